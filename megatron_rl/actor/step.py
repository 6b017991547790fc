"""The optimizer's step, and what may keep it from being made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl.actor.build import step_optimizer
from megatron_rl.actor.evidence import Evidence, Rule
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.objectives.statistics import Statistics


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer update reports; the same on every rank."""

    statistics: Statistics
    grad_norm: float
    learning_rate: float
    skipped: str | None = None  # why there was no step: an unusable value, or its gradient
    stopped: str | None = None  # why a rule let there be none

    @property
    def done(self) -> bool:
        """Whether the weights have moved."""
        return self.skipped is None and self.stopped is None


def take_step(
    optimizer: MegatronOptimizer,
    wrapped: list[DistributedDataParallel],
    evidence: Evidence,
    *,
    rate: float,
    clip_grad: float,
    rule: Rule | None,
) -> UpdateResult:
    """Let the optimizer step if all is well; with the gradient's norm before clipping. Collective.

    rate: the learning rate, which its parameter groups have already. The parts of Megatron's
    `ChainedOptimizer.step`, with the checks between them.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())  # waits for the device: ask it all now
    result = UpdateResult(evidence.statistics, grad_norm, rate)
    try:
        evidence.statistics.raise_on_faults()
    except ValueError as fault:
        return replace(result, skipped=str(fault))
    if not math.isfinite(grad_norm):
        return replace(result, skipped=f"the gradient's norm is {grad_norm}")
    if rule is not None and (reason := rule(evidence)) is not None:
        return replace(result, stopped=reason)
    for part in optimizer_parts(optimizer):
        parameters = part.get_parameters()
        if clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
    step_optimizer(optimizer, wrapped)
    return result
