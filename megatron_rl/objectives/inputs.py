"""Inputs of an objective for one micro-batch: checked without reading values, and masked.

Shapes: t tokens on this rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_ragged, group_size, reduce_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.types import Denominators


@dataclass(frozen=True)
class TokenClasses:
    """Classes of tokens that are reported separately, by policy lag for example."""

    of: Tensor  # [t] int64, 0 to count - 1
    count: int


@dataclass(frozen=True)
class TokenInputs:
    """Per-token inputs [t], in the order of this rank's SequenceLayout; ignored off the mask."""

    policy_logprobs: Tensor  # the loss is differentiable in these
    behavior_logprobs: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor | None = None  # the engine's
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # and in these
    divergence: Tensor | None = None  # and in these: from the reference, over the vocabulary
    further: Mapping[str, Tensor] = field(default_factory=dict)  # of `TokenBatch.further`

    def value(self, name: str) -> Tensor | None:
        """Return an input by name; None if it is missing."""
        return vars(self)[name] if name in vars(self) else self.further.get(name)

    def _values(self) -> dict[str, Tensor]:
        own = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return {**self.further, **own}

    @property
    def log_gap(self) -> Tensor | None:
        """Behavior minus rollout log-probability; [t]."""
        if self.rollout_logprobs is None:
            return None
        return self.behavior_logprobs - self.rollout_logprobs

    def prepared(
        self, layout: SequenceLayout, denominators: Denominators, *, needs: Mapping[str, object]
    ) -> "TokenInputs":
        """Convert to one dtype, set values off the mask to zero, and detach the constants.

        The dtype is float32, or float64 if the policy's log-probabilities are. Raises ValueError
        for a wrong shape, log-probabilities in half precision, a denominator that is not positive,
        and a missing input that an option in `needs` requires.
        """
        self._check(layout)
        check_denominators(denominators)
        for name, option in needs.items():
            if self.value(name) is None:
                raise ValueError(
                    f"{name} is missing, but an option of the objective needs it: {option}"
                )
        dtype = torch.promote_types(self.policy_logprobs.dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device=layout.device)
        masked = {}
        for name, x in self._values().items():
            constant = name not in ("policy_logprobs", "entropy", "divergence")
            own = (x.detach() if constant else x).to(dtype)
            masked[name] = torch.where(layout.mask, own, zero)
        further = {name: masked.pop(name) for name in self.further}
        return TokenInputs(**masked, further=further)

    def _check(self, layout: SequenceLayout) -> None:
        for name, x in self._values().items():
            if x.shape != (layout.local_tokens,):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, but this rank's layout has "
                    f"{layout.local_tokens} tokens: give one value per token"
                )
            if name.endswith("logprobs") and x.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} are {x.dtype}: half precision rounds a ratio of 1.0007 to 1. "
                    "Compute them in float32, from the logits on: `logits.float().log_softmax(-1)`"
                )


@dataclass(frozen=True)
class MinibatchTokens:
    """Decided tokens of a minibatch, for what an objective decides once for all of them.

    n tokens of this rank, N of all ranks of `group`. Values are computed when they are asked for;
    log-ratios take an additional forward pass, and like `sum` and `gather` they are collective.
    """

    advantages: Callable[[], Tensor]  # -> [n], as all of them
    behavior_logprobs: Callable[[], Tensor]
    log_ratios: Callable[[], Tensor]
    group: Group = None

    @classmethod
    def whole(
        cls, log_ratios: Tensor, advantages: Tensor, behavior_logprobs: Tensor
    ) -> "MinibatchTokens":
        """Return the tokens of a minibatch that is in one process; [N] each."""
        return cls(lambda: advantages, lambda: behavior_logprobs, lambda: log_ratios)

    def sum(self, x: Tensor) -> Tensor:
        """Add `x` over the ranks."""
        return reduce_sum(x, group=self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of all ranks' tokens; [n] -> [N]."""
        return x if group_size(self.group) == 1 else gather_ragged(x, group=self.group)


def check_denominators(denominators: Denominators) -> None:
    """Raise ValueError unless both are positive numbers."""
    for name, value in vars(denominators).items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"denominators.{name} is {value}: it must count the whole minibatch, over all "
                "ranks and micro-batches, which has at least one valid decision"
            )
