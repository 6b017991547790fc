"""A model that is trained in place: optimizer steps, checkpoints, and its place in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.build import build_chunks, build_optimizer, step_optimizer, wrap_chunks
from megatron_rl.actor.checkpoint import ShardWriter, load_checkpoint, save_checkpoint
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.digest import describe_layout, digest_tensors, training_state
from megatron_rl.actor.lora import add_adapters, describe_adapters, load_adapters
from megatron_rl.actor.memory import TrainingState, optimizer_parts
from megatron_rl.actor.model import HeadOutputs, PolicyModel
from megatron_rl.actor.pace import Pace
from megatron_rl.actor.packs import LocalPack, PackCache
from megatron_rl.actor.routing import Routing, RoutingRecorder
from megatron_rl.actor.scoring import ScoringModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.weights import check_finite, load_model, named_parameters
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.types import TokenBatch


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


class LossStatistics(Protocol):
    """Statistics of a loss over a minibatch."""

    def raise_on_faults(self) -> None:
        """Raise ValueError if a value is not finite."""


Of = TypeVar("Of", bound=LossStatistics)
# Returns the reason for not running the optimizer step, or None to run it. The statistics are those
# of the whole minibatch.
StopRule = Callable[[Statistics], str | None]


@dataclass(frozen=True)
class Update(Generic[Of]):
    """Result of one optimizer update; identical on every rank."""

    statistics: Of
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


UpdateResult = Update[Statistics]  # of the policy


def take_step(
    optimizer: MegatronOptimizer,
    ddp_chunks: list[DistributedDataParallel],
    statistics: Of,
    *,
    rate: float,
    max_grad_norm: float,
    rule: Callable[[Of], str | None] | None,
) -> Update[Of]:
    """Run the optimizer step unless a check skips it; report the norm before clipping. Collective.

    rate: the learning rate, already set in the parameter groups. The code follows Megatron's
    `ChainedOptimizer.step`, with checks added between its parts.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())  # the only device sync of the step
    result = Update(statistics, grad_norm, rate)
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
            _clip(parameters, max_grad_norm, grad_norm)
    step_optimizer(optimizer, ddp_chunks)
    return result


def _clip(parameters: Sequence[Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients in place to a norm of at most `max_norm`, given their norm.

    Megatron's `clip_grad_by_total_norm_fp32`, which makes a copy of every gradient on a CPU.
    """
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1:
        torch._foreach_mul_([one.grad for one in parameters if one.grad is not None], coefficient)


# A micro-batch's loss per token, and what the last stage reports of it, from the head's output.
MicroBatchLoss = Callable[[TokenBatch, LocalPack, Tensor], tuple[Tensor, Any]]


class TrainedModel(ScoringModel):
    """A model in Megatron-core with an optimizer; every rank of the layout has one.

    model_folder: a Hugging Face folder, the source of the weights. on_micro_batch: called before
    every forward pass of a micro-batch.
    """

    model_class: type[PolicyModel] = PolicyModel  # of its chunks
    # Of updates: "own" for a model that has not recorded the routes of the packs
    update_routing: Routing = "default"

    def __init__(
        self,
        model_folder: str | Path,
        *,
        shape: ModelShape,
        topology: Topology,
        settings: ActorSettings,
        on_micro_batch: Callable[[], object] = lambda: None,
    ) -> None:
        self.model_folder = Path(model_folder)
        self.topology, self.settings, self.shape = topology, settings, shape
        self.updates = 0  # optimizer updates so far, which determine the learning rate
        self.is_initial = True  # the weights are those of `model_folder`
        self.packs = PackCache(shape, topology, dtype=settings.dtype, on_prepare=on_micro_batch)
        with megatron_runtime():
            self.chunks = build_chunks(
                shape, settings=settings, topology=topology, model=self.model_class
            )
            load_model(self.chunks, shape=shape, topology=topology, folder=model_folder)
            if settings.lora:
                add_adapters(
                    self.chunks, settings.lora, seed=settings.seed, shape=shape, topology=topology
                )
                load_adapters(
                    self.chunks, settings.lora, shape=shape, topology=topology, model=model_folder
                )
            self.routing = RoutingRecorder(
                self.chunks, shape=shape, topology=topology, replays=settings.replay_routes
            )
            self.pace = Pace(topology.device)
            self.ddp_chunks = wrap_chunks(self.chunks, settings, before_reduction=self.pace.mark)
            self.modules = self.ddp_chunks
            self.optimizer = build_optimizer(self.ddp_chunks, settings)
        self.training_state = TrainingState(self.ddp_chunks, self.optimizer, device=topology.device)
        self.writer = ShardWriter(topology.host_group)
        self.asleep = False

    def _take_update(
        self,
        micro_batches: Sequence[TokenBatch],
        loss: MicroBatchLoss,
        *,
        outputs: HeadOutputs,
        reduce: Callable[[list[Any]], Of],
        rule: Callable[[Of], str | None] | None = None,
    ) -> tuple[Update[Of], list[Any]]:
        """Run one optimizer update; return its result and the last stage's reports.

        reduce: the reports' statistics over the minibatch, equal on every rank. Collective.
        """
        self.wake_up()
        rate = learning_rate_at(self.updates, self.settings)
        with megatron_runtime():
            for chunk in self.ddp_chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.pace.mark()
            reports = self._run(
                micro_batches,
                loss,
                forward_only=False,
                outputs=outputs,
                routing=self.update_routing,
            )
            statistics = reduce(reports)
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
        if result.done:
            self.updates += 1
            self.is_initial = False
        return result, reports

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
