"""The Megatron actor: log-probs, updates, checkpoints and weights of one policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megatron_rl.actor.build import build_chunks, build_optimizer, step_optimizer, wrap_chunks
from megatron_rl.actor.checkpoint import ShardWriter, load_checkpoint, save_checkpoint
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.digest import describe_layout, digest_tensors, training_state
from megatron_rl.actor.export import export_weights
from megatron_rl.actor.lora import (
    adapted_weights,
    add_adapters,
    describe_adapters,
    load_adapters,
    push_sources,
)
from megatron_rl.actor.memory import TrainingState, optimizer_parts
from megatron_rl.actor.model import HeadOutputs
from megatron_rl.actor.packs import (
    LocalPack,
    PackCache,
)
from megatron_rl.actor.routing import RoutingRecorder
from megatron_rl.actor.scoring import ScoringModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.weights import (
    ProgressCallback,
    check_finite,
    ignore_progress,
    load_model,
    named_parameters,
)
from megatron_rl.distributed.collectives import Group
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.resharding.adapted import LocalWeight
from megatron_rl.resharding.push import LocalWeights
from megatron_rl.types import Minibatch, TokenBatch


def minibatch_tokens(
    micro_batches: Sequence[TokenBatch],
    compute_logprobs: Callable[[Sequence[TokenBatch]], list[Tensor]],
    *,
    group: Group,
    device: torch.device,
) -> MinibatchTokens:
    """Return the response tokens of this rank's part of a minibatch, which spans `group`."""

    def decided(values: Iterable[Tensor | None]) -> Tensor:
        rows = []
        for batch, value in zip(micro_batches, values, strict=True):
            assert value is not None, "compute behavior log-probs before the update"
            rows.append(value.to(device)[batch.response_mask.to(device)])
        return torch.cat(rows)

    def behavior_logprobs() -> Tensor:
        return decided(batch.behavior_logprobs for batch in micro_batches)

    return MinibatchTokens(
        advantages=lambda: decided(batch.advantages_per_token() for batch in micro_batches),
        behavior_logprobs=behavior_logprobs,
        log_ratios=lambda: decided(compute_logprobs(micro_batches)) - behavior_logprobs(),
        group=group,
    )


def reduce_statistics(
    reports: Sequence[Statistics], *, classes: int, topology: Topology
) -> Statistics:
    """Reduce the last stage's statistics over the minibatch and return them on every rank.

    They decide rates and stops, so every rank needs the same bits. A device adds in any order, so
    tensor parallel ranks take the sums of their first rank, and stages those of the last.
    """
    total = Statistics.empty(topology.device, classes=classes)
    if topology.is_last_stage:
        total = reduce(Statistics.merge, reports, total).all_reduce(topology.dp_cp_group)
    for group, size, source in (
        (topology.tp_group, topology.tp_size, 0),
        (topology.pp_group, topology.pp_size, topology.pp_size - 1),
    ):
        for part in total.tensors if size > 1 else ():
            dist.broadcast(part, group=group, group_src=source)
    return total


def learning_rate_at(update: int, settings: ActorSettings) -> float:
    """Return the learning rate of optimizer update number `update`, counted from 0.

    Linear warm-up reaches the full rate at update `warmup_updates - 1` (the first update has a rate
    above 0); then the rate is constant, or decays linearly or by a cosine to the minimum at the
    last update.
    """
    optimizer, done = settings.optimizer, update + 1
    if done <= settings.warmup_updates:
        return optimizer.learning_rate * done / settings.warmup_updates
    span = max(1, settings.total_updates - settings.warmup_updates)
    progress = min(1.0, (done - settings.warmup_updates) / span)
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[optimizer.decay]
    lowest = optimizer.min_learning_rate if optimizer.decay != "constant" else 0.0
    return lowest + (optimizer.learning_rate - lowest) * remaining


# Returns the reason for not running the optimizer step, or None to run it. The statistics are those
# of the whole minibatch.
StopRule = Callable[[Statistics], str | None]


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer update; identical on every rank."""

    statistics: Statistics
    grad_norm: float
    learning_rate: float
    skipped: str | None = None  # reason for a skipped step: a non-finite value or gradient
    stopped: str | None = None  # reason that the stop rule returned
    # [layers, 2]: tokens whose set of experts differs from the recorded one, and all tokens
    routes: Tensor | None = None

    @property
    def done(self) -> bool:
        """True if the weights were updated."""
        return self.skipped is None and self.stopped is None


def take_step(
    optimizer: MegatronOptimizer,
    ddp_chunks: list[DistributedDataParallel],
    statistics: Statistics,
    *,
    rate: float,
    max_grad_norm: float,
    rule: StopRule | None,
) -> UpdateResult:
    """Run the optimizer step unless a check skips it; report the norm before clipping. Collective.

    rate: the learning rate, already set in the parameter groups. The code follows Megatron's
    `ChainedOptimizer.step`, with checks added between its parts.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())  # the only device sync of the step
    result = UpdateResult(statistics, grad_norm, rate)
    try:
        statistics.raise_on_faults()
    except ValueError as fault:
        return replace(result, skipped=str(fault))
    if not math.isfinite(grad_norm):
        return replace(result, skipped=f"the gradient norm is {grad_norm}")
    if rule is not None and (reason := rule(statistics)) is not None:
        return replace(result, stopped=reason)
    for part in optimizer_parts(optimizer):
        parameters = part.get_parameters()
        if max_grad_norm > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_grad_norm, grad_norm)
    step_optimizer(optimizer, ddp_chunks)
    return result


class MegatronActor(ScoringModel):
    """A policy in Megatron-core, trained in place; every rank of the layout has one.

    model_folder: a Hugging Face folder, the source of the shape, the weights and, for exports, the
    tokenizer files. on_micro_batch: called before every forward pass of a micro-batch.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        topology: Topology,
        settings: ActorSettings,
        on_micro_batch: Callable[[], object] = lambda: None,
    ) -> None:
        self.model_folder = Path(model_folder)
        self.topology, self.settings = topology, settings
        self.shape = read_model_shape(model_folder)
        self.updates = 0  # optimizer updates so far, which determine the learning rate
        self.is_initial = True  # the weights are those of `model_folder`
        self.packs = PackCache(
            self.shape, topology, dtype=settings.dtype, on_prepare=on_micro_batch
        )
        with megatron_runtime():
            self.chunks = build_chunks(self.shape, settings=settings, topology=topology)
            load_model(self.chunks, shape=self.shape, topology=topology, folder=model_folder)
            if settings.lora:
                add_adapters(
                    self.chunks, settings.lora, seed=settings.seed,
                    shape=self.shape, topology=topology,
                )  # fmt: skip
                load_adapters(
                    self.chunks, settings.lora, shape=self.shape, topology=topology,
                    model=model_folder,
                )  # fmt: skip
            self.routing = RoutingRecorder(
                self.chunks, shape=self.shape, topology=topology, replays=settings.replay_routes
            )
            self.ddp_chunks = wrap_chunks(self.chunks, settings)
            self.modules = self.ddp_chunks
            self.optimizer = build_optimizer(self.ddp_chunks, settings)
        self.training_state = TrainingState(self.ddp_chunks, self.optimizer, device=topology.device)
        self.writer = ShardWriter(topology.host_group)
        self.asleep = False

    def update(
        self, minibatch: Minibatch, objective: PolicyObjective, *, rule: StopRule | None = None
    ) -> UpdateResult:
        """Run one optimizer update on this data-parallel rank's micro-batches of one minibatch.

        The loss is the sum over all ranks' micro-batches of the objective's per-token losses.
        If an input, a loss or the gradient is not finite, every rank skips the step: weights,
        moments and counts do not change, and the result names the token or the norm. The step is
        also skipped if `rule` returns a reason.
        """
        self._check(minibatch.micro_batches)
        objective = objective.resolve(
            minibatch_tokens(
                minibatch.micro_batches,
                self.compute_logprobs,
                group=self.topology.dp_group,
                device=self.topology.device,
            )
        )
        self.wake_up()
        rate = learning_rate_at(self.updates, self.settings)
        outputs = HeadOutputs(entropy="entropy" in objective.needs, divergence=objective.divergence)
        loss = partial(self._policy_loss, objective, minibatch, outputs)
        with megatron_runtime():
            for chunk in self.ddp_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = minibatch.micro_batches
            reports = self._run(
                batches,
                loss,
                forward_only=False,
                outputs=outputs,
            )
            statistics = reduce_statistics(
                [statistics for statistics, _ in reports],
                classes=minibatch.classes,
                topology=self.topology,
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_mult"]
                group["weight_decay"] = self.settings.optimizer.weight_decay * group["wd_mult"]
            result = take_step(
                self.optimizer,
                self.ddp_chunks,
                statistics,
                rate=rate,
                max_grad_norm=self.settings.optimizer.max_grad_norm,
                rule=rule,
            )
            if result.stopped is None:  # skipped updates are included: row i belongs to epoch i
                self._trace(batches, [logprobs for _, logprobs in reports])
        if result.done:
            self.updates += 1
            self.is_initial = False
        return replace(result, routes=self.routing.pop_counts())

    def named_parameters_local(self) -> Mapping[str, LocalWeight]:
        """Return this rank's parameters by Megatron name, prefixed by `chunk{i}.` if several.

        Weights with an adapter are sums with its product; adapters are not listed.
        """
        if (lora := self.settings.lora) is None:
            return named_parameters(self.chunks)
        return adapted_weights(self.chunks, lora, seed=self.settings.seed, updates=self.updates)

    def push_sources(self) -> tuple[LocalWeights, LocalWeights]:
        """Return the frozen weights, and the factors of adapters, to be pushed apart."""
        lora, topology = self.settings.lora, self.topology
        return push_sources(self.chunks, lora, shape=self.shape, topology=topology)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of this rank's policy by name: parameters, then adapters."""
        return named_parameters(self.chunks) | named_parameters(self.chunks, adapters=True)

    def sleep(self) -> None:
        """Offload optimizer state, free gradients and packs; log-probs still work while asleep."""
        self.packs.clear()
        if not self.asleep:
            with megatron_runtime():
                self.training_state.offload()
            self.asleep = True

    def wake_up(self) -> None:
        """Restore gradients and optimizer state; `update` and `load` do this automatically."""
        if self.asleep:
            with megatron_runtime():
                self.training_state.restore()
            self.asleep = False

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint; `folder` appears only when complete. Works asleep. Collective."""
        with megatron_runtime():
            save_checkpoint(folder, writer=self.writer, updates=self.updates, **self._state())

    def load(self, folder: str | Path) -> None:
        """Load a checkpoint saved under this or another layout. Collective."""
        self.wake_up()
        self.is_initial = False
        with megatron_runtime():
            self.updates = load_checkpoint(folder, topology=self.topology, **self._state())

    def _state(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "optimizer": self.optimizer, "adapters": self._adapters}

    @cached_property
    def _adapters(self) -> dict[str, Any] | None:
        return describe_adapters(
            self.settings.lora, seed=self.settings.seed, folder=self.model_folder
        )

    def check_weights(self) -> None:
        """Raise FloatingPointError if any of this rank's parameters is not finite."""
        check_finite(self.tensors())

    @property
    def layout(self) -> str:
        """Description of the sharding and numerics under which digests are comparable."""
        return describe_layout(self.topology, self.chunks[0].config, self.settings.dtype)

    def digest(self) -> dict[str, str]:
        """Return this rank's layout and its state's digest, comparable between equal layouts."""
        state = training_state(self.tensors().values(), self.optimizer)
        return {"layout": self.layout, "sum": digest_tensors(state, device=self.topology.device)}

    def export_hf(self, folder: str | Path, progress: ProgressCallback = ignore_progress) -> None:
        """Write the policy as a Hugging Face folder that transformers and vLLM load. Collective.

        progress: called with the numbers of finished and total steps.
        """
        export_weights(
            self.named_parameters_local(),
            shape=self.shape,
            topology=self.topology,
            source=self.model_folder,
            folder=folder,
            progress=progress,
        )

    def _policy_loss(
        self,
        objective: PolicyObjective,
        minibatch: Minibatch,
        outputs: HeadOutputs,
        batch: TokenBatch,
        pack: LocalPack,
        output: Tensor,
    ) -> tuple[Tensor, tuple[Statistics, Tensor]]:
        """Compute one micro-batch's loss; also return statistics and the log-probs, [1, t]."""
        result = objective(
            pack.token_inputs(batch, output, outputs),
            layout=pack.layout,
            denominators=minibatch.denominators,
            classes=pack.token_classes(batch, minibatch.classes),
        )
        return result.loss, (result.statistics, output[:1].detach())

    def _trace(self, micro_batches: Sequence[TokenBatch], local: list[Tensor]) -> None:
        """Append the policy's log-probs to the packs that record them; local [1, t] each."""
        indices = [i for i, b in enumerate(micro_batches) if b.traced_logprobs is not None]
        if not indices:  # equal on all ranks of a replica, so the collectives match
            return
        traced = [micro_batches[i] for i in indices]
        values = self._gather(traced, [local[i] for i in indices] if local else [], rows=1)
        for batch, value in zip(traced, values, strict=True):
            assert batch.traced_logprobs is not None
            batch.traced_logprobs.append(value[:, 0])
