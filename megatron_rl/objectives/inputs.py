"""Check what can be checked without reading values, and drop what the mask excludes.

Shapes: t tokens on this rank.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.spec import ObjectiveSpec
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class Observed:
    """The inputs as given, whatever they are off the mask; [t] each."""

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """The inputs in one dtype, zero off the mask; [t] each."""

    policy: Tensor
    behavior: Tensor
    advantages: Tensor
    reference: Tensor | None
    entropy: Tensor | None
    log_gap: Tensor | None  # behavior minus rollout log-probability


def prepare(
    observed: Observed,
    layout: SequenceLayout,
    denominators: Denominators,
    *,
    spec: ObjectiveSpec | None = None,
) -> Prepared:
    """Mask, promote and detach the inputs of an objective.

    Half precision cannot tell 1 from 1 + 7e-4, so everything is computed in float32 or, where
    the policy's log-probabilities are, in float64. Raises ValueError for a wrong shape, a
    denominator that is not positive, and an input that an option of `spec` needs but is missing.
    """
    for name, value in vars(observed).items():
        if value is not None and value.shape != (layout.local_tokens,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but this rank's layout holds "
                f"{layout.local_tokens} tokens: give one value per token"
            )
    for name, value in vars(denominators).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"denominators.{name} is {value}: it must count the whole minibatch, over all "
                "ranks and micro-batches, which has at least one valid decision"
            )
    if spec is not None:
        _require(observed, spec)
    dtype = torch.promote_types(observed.policy_logprobs.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=layout.device)

    def masked(x: Tensor) -> Tensor:
        return torch.where(layout.mask, x.to(dtype), zero)

    behavior = masked(observed.behavior_logprobs.detach())
    rollout, reference = observed.rollout_logprobs, observed.reference_logprobs
    return Prepared(
        policy=masked(observed.policy_logprobs),
        behavior=behavior,
        advantages=masked(observed.advantages.detach()),
        reference=None if reference is None else masked(reference.detach()),
        entropy=None if observed.entropy is None else masked(observed.entropy),
        log_gap=None if rollout is None else behavior - masked(rollout.detach()),
    )


def _require(observed: Observed, spec: ObjectiveSpec) -> None:
    for name, option in spec.needs.items():
        if getattr(observed, name) is None:
            raise ValueError(f"the objective's options need {name}, which were not given: {option}")
