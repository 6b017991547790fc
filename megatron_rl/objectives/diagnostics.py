"""Compute a micro-batch's Statistics with a fixed number of device operations.

On a CPU they run over blocks of tokens that stay in its cache. Shapes: t tokens on this rank, b
in a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.objectives import schema
from megatron_rl.objectives.buckets import BucketTable, position_pairs
from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.inputs import Prepared
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.weights import LogRatios

CPU_BLOCK = 2**14  # tokens: a column of float64 is 128 KiB
# Rounding of a float32 log-softmax can lift a probability of 1 slightly above 0.
BEHAVIOR_LIMIT = 1e-4


@dataclass(frozen=True)
class Losses:
    """The terms of the per-token loss; [t] each, None where the term is off."""

    policy: Tensor
    kl: Tensor | None = None
    entropy: Tensor | None = None

    def total(self) -> Tensor:
        """The sum of the terms; [t]."""
        total = self.policy
        for term in (self.kl, self.entropy):
            if term is not None:
                total = total + term
        return total


@dataclass(frozen=True)
class TokenColumns:
    """What the statistics are made of; [t] or [b] each."""

    mask: Tensor
    position: Tensor
    length: Tensor
    pair: Tensor  # of position buckets, see buckets.py
    policy: Tensor
    behavior: Tensor
    advantages: Tensor
    log_ratio: Tensor
    prefix_sum: Tensor
    log_weight: Tensor  # of the objective's own weight
    weight: Tensor  # what multiplies the advantage and the score
    inside: Tensor
    loss: Tensor
    loss_policy: Tensor
    loss_kl: Tensor | None
    loss_entropy: Tensor | None
    log_gap: Tensor | None
    reference: Tensor | None
    entropy: Tensor | None

    def block(self, start: int, size: int) -> "TokenColumns":
        """`size` tokens from `start` on."""
        end = start + size
        parts: dict[str, Any] = {
            name: None if column is None else column[start:end]
            for name, column in vars(self).items()
        }
        return TokenColumns(**parts)


@torch.no_grad()
def compute_statistics(
    x: Prepared,
    *,
    losses: Losses,
    loss: Tensor,
    ratios: LogRatios,
    log_weight: Tensor,
    constrained: Constrained,
) -> Statistics:
    """The statistics of one micro-batch's tokens on this rank; `loss` [t] is the losses' sum."""
    layout = ratios.layout
    columns = TokenColumns(
        mask=layout.mask,
        position=layout.position,
        length=layout.length,
        pair=layout.once(position_pairs),
        policy=x.policy,
        behavior=x.behavior,
        advantages=x.advantages,
        log_ratio=ratios.token,
        prefix_sum=ratios.prefix_sum,
        log_weight=log_weight,
        weight=constrained.score_weight,
        inside=constrained.inside,
        loss=loss,
        loss_policy=losses.policy,
        loss_kl=losses.kl,
        loss_entropy=losses.entropy,
        log_gap=x.log_gap,
        reference=x.reference,
        entropy=x.entropy,
    )
    table = BucketTable.empty(layout.device)
    scalars, maxima, suspects = [], [], []
    size = CPU_BLOCK if layout.device.type == "cpu" else layout.local_tokens
    for start in range(0, layout.local_tokens, size):
        block = columns.block(start, size)
        table.add(block)
        scalars.append(_scalar_sums(block))
        maxima.append(_maxima(block))
        suspects.append(start + _suspects(block))
    suspect = torch.cat(suspects)
    place = layout.sequence_ids[suspect] * schema.PLACE + layout.position[suspect]
    faults = _faults(columns, suspect)
    return Statistics(
        torch.cat((torch.stack(scalars).sum(dim=0), table.margins())),
        torch.cat(
            (
                torch.stack(maxima).amax(dim=0),
                torch.where(faults, -place.double(), -torch.inf).amax(dim=1),
            )
        ),
    )


def _scalar_sums(x: TokenColumns) -> Tensor:
    """One number for each of schema.SUMS."""
    log_ratio = x.log_ratio.double()
    rows = {
        "responses": x.mask & (x.position == x.length),  # each has one last decision
        "loss_policy": x.loss_policy,
        "loss_kl": x.loss_kl,
        "loss_entropy": x.loss_entropy,
        "log_ratio": log_ratio,
        "kl_to_behavior": torch.expm1(log_ratio.clamp(max=700)) - log_ratio,
        "rollout_gap_absolute": None if x.log_gap is None else x.log_gap.abs(),
        "entropy_tokens": None if x.entropy is None else x.mask,
        "entropy": x.entropy,
    }
    zero = torch.zeros((), dtype=torch.float64, device=x.mask.device)
    return torch.stack(
        [zero if (row := rows[name]) is None else row.double().sum() for name in schema.SUMS]
    )


def _maxima(x: TokenColumns) -> Tensor:
    """One number for each of schema.MAXIMA; log-ratio and gap are 0 off the mask."""
    least, most = torch.aminmax(x.log_ratio)
    zero = torch.zeros_like(most)
    numbers = {
        "log_ratio": most,
        "minus_log_ratio": -least,
        "log_weight": torch.where(x.mask, x.log_weight, -torch.inf).amax(),
        "minus_log_weight": -torch.where(x.mask, x.log_weight, torch.inf).amin(),
        "rollout_gap": zero if x.log_gap is None else x.log_gap.abs().amax(),
    }
    return torch.stack([numbers[name].double() for name in schema.MAXIMA])


def _suspects(x: TokenColumns) -> Tensor:
    """The first token with an unusable input and the first with an unusable loss; [2].

    Any token where there is none: `_faults` decides. One pass over a sum instead of one per input:
    a sum is not finite if one of its terms is not.
    """
    inputs = x.policy + x.behavior + x.advantages
    for given in (x.log_gap, x.reference, x.entropy):
        if given is not None:
            inputs = inputs + given
    bad = _not_finite(inputs) | (x.behavior > BEHAVIOR_LIMIT)
    return torch.stack((bad, _not_finite(x.loss))).byte().argmax(dim=1)


def _faults(x: TokenColumns, index: Tensor) -> Tensor:
    """Which of schema.FAULTS the tokens `index` [n] have; [FAULTS, n] bool."""
    columns = {
        "policy_logprobs": x.policy,
        "behavior_logprobs": x.behavior,
        "advantages": x.advantages,
        "rollout_logprobs": x.log_gap,
        "reference_logprobs": x.reference,
        "entropy": x.entropy,
        "loss": x.loss,
    }
    none = torch.zeros_like(index, dtype=torch.bool)
    found = {k: none if v is None else _not_finite(v[index]) for k, v in columns.items()}
    found["behavior_logprobs_positive"] = x.behavior[index] > BEHAVIOR_LIMIT
    return torch.stack([found[name] for name in schema.FAULTS])


def _not_finite(x: Tensor) -> Tensor:
    """~isfinite(x) in two passes: x - x is 0, and nan for what is not finite; bool."""
    return (x - x) != 0
