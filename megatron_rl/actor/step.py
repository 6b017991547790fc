"""The optimizer step, and the checks that can skip it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megatron_rl.actor.build import step_optimizer
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.objectives.statistics import Statistics

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
