"""The Megatron actor: log-probs, updates, checkpoints and weights of one policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.actor.build import build_chunks, build_optimizer, wrap_chunks
from megatron_rl.actor.checkpoint import load_checkpoint, load_model, save_checkpoint
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.digest import describe_layout, digest_tensors, training_state
from megatron_rl.actor.evidence import Evidence, Rule, head_gradient_energy
from megatron_rl.actor.fitting import fit_objective
from megatron_rl.actor.learning_rate import learning_rate_at
from megatron_rl.actor.loss_contract import as_megatron_loss
from megatron_rl.actor.memory import TrainingState
from megatron_rl.actor.packs import LocalPack, PackCache, check_pack
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.step import UpdateResult, take_step
from megatron_rl.actor.weights import export_weights, named_parameters
from megatron_rl.data.packing import build_pack
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.types import Minibatch, TokenBatch


class MegatronActor:
    """A policy in Megatron-core, trained in place; every rank of the layout holds one.

    model_folder: Hugging Face folder, or one that `megatron-rl convert` made; gives shape, weights
    and, for exports, tokenizer files.
    """

    def __init__(
        self, model_folder: str | Path, *, topology: Topology, settings: ActorSettings
    ) -> None:
        self.model_folder = Path(model_folder)
        self.topology, self.settings = topology, settings
        self.shape = read_model_shape(model_folder)
        self.updates = 0  # optimizer updates so far: the learning rate's clock
        self.packs = PackCache(self.shape, topology, dtype=settings.dtype)
        with megatron_runtime():
            self.chunks = build_chunks(self.shape, settings=settings, topology=topology)
            load_model(self.chunks, shape=self.shape, topology=topology, folder=model_folder)
            self.wrapped = wrap_chunks(self.chunks, settings)
            self.optimizer = build_optimizer(self.wrapped, settings)
        self.training_state = TrainingState(self.wrapped, self.optimizer, device=topology.device)
        self.sequence_parallel = self.chunks[0].config.sequence_parallel
        self.asleep = False

    def compute_logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Log-probs of the labels, [T] per pack, 0 off the mask; on every rank of the replica.

        Forward only, by the code and on the packs that training uses, so that the two agree bit
        for bit while the weights are the same.
        """
        return [values[:, 0] for values in self._score(micro_batches, entropy=False)]

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """The same log-probs, each pack's with the policy's entropies (nats) at their positions."""
        scored = self._score(micro_batches, entropy=True)
        # Copies: log-probs stay for the whole rollout batch, and would keep the entropies.
        return [(values[:, 0].contiguous(), values[:, 1]) for values in scored]

    def _score(self, micro_batches: Sequence[TokenBatch], *, entropy: bool) -> list[Tensor]:
        """What the head says of each pack's labels: log-prob, and entropy if asked; [T, 1|2]."""
        self._check(micro_batches)
        with megatron_runtime(), torch.no_grad():
            local = self._run(micro_batches, _keep_output, forward_only=True, entropy=entropy)
        return self._gather_packs(micro_batches, local[: len(micro_batches)], rows=1 + entropy)

    def update(
        self, minibatch: Minibatch, objective: PolicyObjective, *, rule: Rule | None = None
    ) -> UpdateResult:
        """One optimizer update on this data-parallel rank's micro-batches of one minibatch.

        The loss is the sum over all ranks' micro-batches of the objective's per-token losses.
        Where an input, a loss or the gradient is not finite, every rank skips the step alike: no
        weight, no moment and no count changes, and the result says which token or what norm. So it
        is where `rule` gives a reason.
        """
        self._check(minibatch.micro_batches)
        objective = fit_objective(
            objective, minibatch.micro_batches, self.compute_logprobs, group=self.topology.dp_group
        )
        self.wake_up()
        rate = learning_rate_at(self.updates, self.settings)
        loss = partial(self._policy_loss, objective, minibatch)
        with megatron_runtime():
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = minibatch.micro_batches
            reports = self._run(
                batches,
                loss,
                forward_only=False,
                entropy="entropy" in objective.needs,
            )
            statistics = self._reduce([told for told, _ in reports], classes=minibatch.classes)
            self._trace(batches, [logprobs for _, logprobs in reports])
            if power := self.settings.effective_samples_power:
                rate *= statistics.everything().effective_sample_fraction() ** power
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_mult"]
                group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
            evidence = Evidence(statistics, self._head_energy)
            result = take_step(
                self.optimizer,
                self.wrapped,
                evidence,
                rate=rate,
                clip_grad=self.settings.clip_grad,
                rule=rule,
            )
        self.updates += result.done
        return result

    def named_parameters_local(self) -> Mapping[str, Tensor]:
        """This rank's parameters by Megatron's names, after `chunk{i}.` if there are several."""
        return named_parameters(self.chunks)

    def sleep(self) -> None:
        """Take gradients, optimizer state and prepared packs off the device.

        Log-probs can still be computed.
        """
        self.packs.clear()
        if not self.asleep:
            with megatron_runtime():
                self.training_state.offload()
            self.asleep = True

    def wake_up(self) -> None:
        """Bring gradients and optimizer state back; `update` and `load` do it themselves."""
        if self.asleep:
            with megatron_runtime():
                self.training_state.restore()
            self.asleep = False

    def save(self, folder: str | Path) -> None:
        """Write all of it, complete under its name or not there; asleep or not. Collective."""
        with megatron_runtime():
            save_checkpoint(folder, updates=self.updates, **self._held())

    def load(self, folder: str | Path) -> None:
        """Continue from a saved folder, of this layout or another. Collective."""
        self.wake_up()
        with megatron_runtime():
            self.updates = load_checkpoint(folder, **self._held())

    def _held(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "topology": self.topology, "optimizer": self.optimizer}

    def check_weights(self) -> None:
        """Raise FloatingPointError naming this rank's parameters that are not finite."""
        parameters = self.named_parameters_local()
        largest = torch.stack(torch._foreach_norm(list(parameters.values()), math.inf))
        finite = torch.isfinite(largest).tolist()
        wrong = [name for name, good in zip(parameters, finite, strict=True) if not good]
        if wrong:
            raise FloatingPointError(
                f"{len(wrong)} parameters are not finite, first {wrong[0]}; the last checkpoint is "
                "older than that: continue from it with a lower optimizer.learning_rate"
            )

    @property
    def layout(self) -> str:
        """Under which the same weights give the same bits, and each rank holds the same of them."""
        return describe_layout(self.topology, self.chunks[0].config, self.settings.dtype)

    def digest(self) -> dict[str, str]:
        """What this rank holds, as a number, and in which layout: where that differs, so may it."""
        state = training_state(self.named_parameters_local().values(), self.optimizer)
        return {"layout": self.layout, "sum": digest_tensors(state, device=self.topology.device)}

    def export_hf(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder that transformers and vLLM load. Collective."""
        export_weights(
            self.named_parameters_local(),
            shape=self.shape,
            topology=self.topology,
            source=self.model_folder,
            folder=folder,
        )

    def _head_energy(self) -> float:
        return head_gradient_energy(self.chunks, self.optimizer, device=self.topology.device)

    def _check(self, micro_batches: Sequence[TokenBatch]) -> None:
        alignment = self.topology.alignment(sequence_parallel=self.sequence_parallel)
        for batch in micro_batches:
            check_pack(batch, alignment=alignment, vocab_size=self.shape.vocab_size)

    def _run(
        self,
        micro_batches: Sequence[TokenBatch],
        compute: Callable[[TokenBatch, LocalPack, Tensor], tuple[Tensor, Any]],
        *,
        forward_only: bool,
        entropy: bool = False,
    ) -> list[Any]:
        """Walk the micro-batches by Megatron's schedule; reports of the last stage, else [].

        Reports of fillers, which make up whole rounds of interleaved stages, stand at the end.
        """
        missing = -len(micro_batches) % self.topology.round_size
        walked = [*micro_batches, *(self._filler() for _ in range(missing))]

        def step(batches: Any, model: Any) -> tuple[Tensor, Any]:
            batch = next(batches)
            pack = self.packs.prepare(batch)
            output = model(pack.inputs, entropy=entropy)
            return output, as_megatron_loss(partial(compute, batch, pack))

        longest = max(sum(batch.lengths) for batch in walked)
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(walked) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(walked),
            seq_length=longest // self.topology.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _filler(self) -> TokenBatch:
        """A pack without response tokens: it adds zeros to every sum."""
        pack = build_pack(
            [],
            torch.empty(0),
            indices=(),
            alignment=self.topology.alignment(sequence_parallel=self.sequence_parallel),
            gemm_tokens=self.settings.gemm_tokens,
        )
        nothing = pack.response_mask.float()
        return replace(pack, behavior_logprobs=nothing, reference_logprobs=nothing)

    def _policy_loss(
        self,
        objective: PolicyObjective,
        minibatch: Minibatch,
        batch: TokenBatch,
        pack: LocalPack,
        output: Tensor,
    ) -> tuple[Tensor, tuple[Statistics, Tensor]]:
        """The loss of one micro-batch; its statistics and the policy's log-probs, [1, t]."""
        assert batch.behavior_logprobs is not None, "behavior log-probs come before the update"
        logprobs, *entropy = output  # [1|2, t]
        rollout, reference = batch.rollout_logprobs, batch.reference_logprobs
        classes = None
        if minibatch.classes and batch.classes is not None:
            classes = TokenClasses(pack.shard(batch.classes), minibatch.classes)
        result = objective(
            TokenInputs(
                policy_logprobs=logprobs,
                behavior_logprobs=pack.shard(batch.behavior_logprobs),
                advantages=pack.spread(batch.advantages),
                rollout_logprobs=None if rollout is None else pack.shard(rollout),
                reference_logprobs=None if reference is None else pack.shard(reference),
                entropy=entropy[0] if entropy else None,
            ),
            layout=pack.layout,
            denominators=minibatch.denominators,
            classes=classes,
        )
        return result.loss, (result.statistics, output[:1].detach())

    def _trace(self, micro_batches: Sequence[TokenBatch], local: list[Tensor]) -> None:
        """Keep the policy's log-probs at this update where a batch asks for it; local [1, t]."""
        asked = [i for i, b in enumerate(micro_batches) if b.traced_logprobs is not None]
        if not asked:  # the packs of a replica are the same on all its ranks
            return
        kept = [micro_batches[i] for i in asked]
        values = self._gather_packs(kept, [local[i] for i in asked] if local else [], rows=1)
        for batch, value in zip(kept, values, strict=True):
            assert batch.traced_logprobs is not None
            batch.traced_logprobs.append(value[:, 0])

    def _gather_packs(
        self, micro_batches: Sequence[TokenBatch], local: list[Tensor], *, rows: int
    ) -> list[Tensor]:
        """What the last stage holds of each pack, [rows, t], on every rank of the replica."""
        packs = [self.packs.prepare(batch) for batch in micro_batches]
        sizes = [pack.layout.local_tokens for pack in packs]
        flat = self._from_last_stage(local, (rows, sum(sizes)))
        parts = zip(packs, flat.split(sizes, dim=1), strict=True)
        return [pack.layout.gather(part.t().contiguous()) for pack, part in parts]  # [T, rows]

    def _from_last_stage(self, local: list[Tensor], shape: tuple[int, int]) -> Tensor:
        """What the last stage says of each token, on every pipeline stage; [rows, tokens]."""
        if self.topology.is_last_stage:
            flat = torch.cat(local, dim=1)
        else:
            flat = torch.empty(shape, dtype=torch.float32, device=self.topology.device)
        if self.topology.pp_size > 1:
            dist.broadcast(flat, group=self.topology.pp_group, group_src=self.topology.pp_size - 1)
        return flat

    def _reduce(self, reports: list[Statistics], *, classes: int) -> Statistics:
        """Statistics of the whole minibatch on every rank; the last stage has computed them."""
        total = Statistics.empty(self.topology.device, classes=classes)
        if self.topology.is_last_stage:
            total = reduce(Statistics.merge, reports, total)
            total = total.all_reduce(self.topology.dp_cp_group)
        if self.topology.pp_size > 1:
            last = self.topology.pp_size - 1
            for part in total.tensors:
                dist.broadcast(part, group=self.topology.pp_group, group_src=last)
        return total


def _keep_output(batch: TokenBatch, pack: LocalPack, output: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing to learn: the output itself is what is reported; [1|2, t]."""
    return output[0], output
