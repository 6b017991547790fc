"""The Megatron actor: log-probs, updates, checkpoints and weights of one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.export import export_weights
from megatron_rl.actor.lora import adapted_weights, push_sources
from megatron_rl.actor.model import HeadOutputs
from megatron_rl.actor.packs import LocalPack
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.training import StopRule, TrainedModel, UpdateResult
from megatron_rl.actor.weights import ProgressCallback, ignore_progress, named_parameters
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

    They decide rates and stops, so every rank needs the same bits. Additions on a device have no
    fixed order, so tensor parallel ranks take the sums of their first rank, and stages the sums of
    the last stage.
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


class MegatronActor(TrainedModel):
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
        super().__init__(
            model_folder,
            shape=read_model_shape(model_folder),
            topology=topology,
            settings=settings,
            on_micro_batch=on_micro_batch,
        )

    def update(
        self, minibatch: Minibatch, objective: PolicyObjective, *, rule: StopRule | None = None
    ) -> UpdateResult:
        """Run one optimizer update on this data-parallel rank's micro-batches of one minibatch.

        The loss is the sum over all ranks' micro-batches of the objective's per-token losses.
        If an input, a loss or the gradient is not finite, every rank skips the step: weights,
        moments and counts do not change, and the result names the token or the norm. The step is
        also skipped if `rule` returns a reason.
        """
        batches = minibatch.micro_batches
        self._check(batches)
        objective = objective.resolve(
            minibatch_tokens(
                batches,
                self.compute_logprobs,
                group=self.topology.dp_group,
                device=self.topology.device,
            )
        )
        outputs = HeadOutputs(entropy="entropy" in objective.needs, divergence=objective.divergence)
        result, reports = self._take_update(
            batches,
            partial(self._policy_loss, objective, minibatch, outputs),
            outputs=outputs,
            reduce=lambda reports: reduce_statistics(
                [statistics for statistics, _ in reports],
                classes=minibatch.classes,
                topology=self.topology,
            ),
            rule=rule,
        )
        if result.stopped is None:  # skipped updates are included: row i belongs to epoch i
            with megatron_runtime():
                self._trace(batches, [logprobs for _, logprobs in reports])
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
