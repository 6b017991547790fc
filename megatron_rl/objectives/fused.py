"""The token-level part of an objective in one Triton kernel; the torch path is its oracle.

Covers what has a per-token slope: the token score with every weight, and the path score with the
token's own ratio, but not truncated: its gradient ends at the bounds, the kernel's does
not. Shapes: t tokens on this rank.
"""

import functools
import importlib.util
import struct
import warnings
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import schema
from megatron_rl.objectives.buckets import bucket_margins, position_pairs
from megatron_rl.objectives.inputs import Observed
from megatron_rl.objectives.spec import (
    CONSTRAINTS,
    Bounds,
    HardGate,
    ObjectiveSpec,
    PpoClip,
    Truncate,
    TvFilter,
)
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.weights import LogRatios
from megatron_rl.types import Denominators

BLOCK = 512  # tokens per program


@functools.cache
def triton_works(device: str = "cuda") -> bool:
    """Whether Triton is installed and can build and start a kernel there.

    Without Triton the torch path is silent; with one that fails (no C compiler, an unknown
    device) it warns once: the objective is right either way, and slower.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from megatron_rl.objectives.fused_kernel import probe_kernel

        result = torch.zeros(1, dtype=torch.int32, device=device)
        probe_kernel[(1,)](result)
        return bool(result.item() == 1)
    except Exception as problem:  # noqa: BLE001 - a compiler, a driver or a linker may raise anything
        warnings.warn(
            f"Triton is installed but runs no kernel on {device} ({type(problem).__name__}: "
            f"{problem}): objectives are evaluated by torch calls instead of one kernel",
            stacklevel=2,
        )
        return False


def covers(spec: ObjectiveSpec) -> bool:
    """Whether the kernel computes this objective: no optional terms, a slope per token."""
    plain = spec.kl is None and not spec.entropy_coefficient and spec.rollout_correction is None
    per_token = spec.score == "token" or spec.weight == "token"
    ends_at_bounds = spec.score == "path" and isinstance(spec.constraint, Truncate)
    return plain and per_token and not isinstance(spec.constraint, TvFilter) and not ends_at_bounds


def weight_statistic(spec: ObjectiveSpec, ratios: LogRatios) -> tuple[Tensor, str]:
    """The sum or minimum behind the log-weight, and what the kernel divides it by; [t]."""
    match spec.weight:
        case "token":
            return ratios.token, "1"
        case "prefix_mean":
            return ratios.prefix_sum, "t"
        case "prefix_product":
            return ratios.prefix_sum, "1"
        case "sequence_mean":
            return ratios.sequence_sum, "L"
        case "sequence_product":
            return ratios.sequence_sum, "1"
    return ratios.prefix_min, "1"


class _TokenTerm(torch.autograd.Function):
    """(loss, sums, maxima); backward: -slope, the statistics have none."""

    @staticmethod
    def forward(
        ctx: Any, policy: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, slope, sums, maxima = launch(policy.detach(), **arguments)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(sums, maxima)
        return loss, sums, maxima

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return -grad * slope, None


def launch(
    policy: Tensor,
    *,
    spec: ObjectiveSpec,
    observed: Observed,
    ratios: LogRatios,
    denominators: Denominators,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel: loss [t], slope [t], sums [SUMS_SIZE], maxima [MAXIMA_SIZE]."""
    from megatron_rl.objectives.fused_kernel import token_kernel

    layout: SequenceLayout = ratios.layout
    programs = -(-layout.local_tokens // BLOCK)
    statistic, divisor = weight_statistic(spec, ratios)
    scalars = policy.new_empty((programs, len(schema.SUMS)), dtype=torch.float64)
    maxima = policy.new_empty((programs, schema.MAXIMA_SIZE), dtype=torch.float64)
    counts = policy.new_zeros((schema.BUCKETS, len(schema.COUNTS)), dtype=torch.float64)
    columns = policy.new_zeros(
        (schema.BUCKETS, len(schema.BUCKET_SUMS) - len(schema.COUNTS)), dtype=torch.float64
    )
    histogram = policy.new_zeros((schema.PAIRS, schema.BINS), dtype=torch.int32)
    loss, slope = torch.empty_like(policy), torch.empty_like(policy)
    bounds = spec.constraint if isinstance(spec.constraint, Bounds) else Bounds(low=None, high=None)
    rollout = observed.rollout_logprobs
    token_kernel[(programs,)](
        observed.policy_logprobs.detach().contiguous(), observed.behavior_logprobs.contiguous(),
        observed.advantages.contiguous(), policy if rollout is None else rollout.contiguous(),
        statistic, ratios.prefix_sum,
        layout.mask, layout.position, layout.length, layout.sequence_ids,
        layout.once(position_pairs),
        loss, slope, scalars, maxima, counts, columns, histogram,
        layout.local_tokens, *_denominator(spec, denominators),
        HAS_ROLLOUT=rollout is not None,
        WEIGHT_DIVISOR=divisor,
        **compile_time_choices(spec, bounds),
    )  # fmt: skip
    tables = _bucket_tables(counts, columns, histogram, has_rollout=rollout is not None)
    return loss, slope, torch.cat((scalars.sum(dim=0), tables)), maxima.amax(dim=0)


def _bucket_tables(
    counts: Tensor, columns: Tensor, histogram: Tensor, *, has_rollout: bool
) -> Tensor:
    """[BUCKETS, BUCKET_SUMS] and [BUCKETS, BINS], flat, from what the kernel added up."""
    tokens = counts.sum(dim=1)  # [BUCKETS]
    if has_rollout:
        columns[:, -1] = tokens
    bins = bucket_margins(histogram.double()).view(schema.BUCKETS, schema.BINS)
    bins[:, schema.HALF] = tokens - bins.sum(dim=1)  # log-weights of 0 are not added one by one
    return torch.cat((torch.cat((counts, columns), dim=1).reshape(-1), bins.reshape(-1)))


def compile_time_choices(spec: ObjectiveSpec, bounds: Bounds) -> dict[str, Any]:
    """The kernel's constants that follow from the objective alone."""
    kinds = {cls: kind for kind, cls in CONSTRAINTS.items()}
    dual = bounds.dual if isinstance(bounds, PpoClip) else None
    return {
        "low": bounds.low or 0.0,
        "high": bounds.high or 0.0,
        "dual": dual or 0.0,
        "power": bounds.power or 0.0,
        "KIND": kinds[type(spec.constraint)],
        "SIDED": bounds.sided if isinstance(bounds, HardGate) else "both",
        "SPACE": bounds.space,
        "SCALE": bounds.scale,
        "HAS_LOW": bounds.low is not None,
        "HAS_HIGH": bounds.high is not None,
        "HAS_DUAL": dual is not None,
        "TOKEN_SCORE": spec.score == "token",
        "RESPONSE_MEAN": spec.aggregation == "response_mean",
        "BLOCK": BLOCK,
    }


def _denominator(spec: ObjectiveSpec, denominators: Denominators) -> tuple[float, float]:
    """The divisor as its float32 value and the rest, exact to 48 bits."""
    divisor = {
        "response_mean": denominators.responses,
        "token_mean": denominators.tokens,
        "response_sum": denominators.responses * spec.constant,
        "token_sum": spec.constant,
    }[spec.aggregation]
    (rounded,) = struct.unpack("f", struct.pack("f", divisor))
    return rounded, divisor - rounded


def evaluate(
    spec: ObjectiveSpec,
    observed: Observed,
    policy: Tensor,
    ratios: LogRatios,
    denominators: Denominators,
) -> tuple[Tensor, Statistics]:
    """Loss [t], differentiable in `policy` (the masked log-probabilities), and the statistics."""
    arguments = {
        "spec": spec,
        "observed": observed,
        "ratios": ratios,
        "denominators": denominators,
    }
    loss, sums, maxima = _TokenTerm.apply(policy, arguments)
    return loss, Statistics(sums, maxima)
