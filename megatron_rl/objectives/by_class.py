"""How a constraint and its weights do in classes of tokens, by tenths of the response.

A class is what the caller says, the lag of a token for instance. Only sums, which merge over
micro-batches and ranks. Shapes: t tokens on this rank, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.statistics import (
    BAND_SUMS,
    BANDS,
    CLASS_SUMS,
    COUNTS,
    DECILES,
    SIZES,
    Statistics,
)
from megatron_rl.objectives.weights import LogRatios


@torch.no_grad()
def sum_by_class(
    given: TokenInputs,
    ratios: LogRatios,
    constrained: Constrained,
    *,
    classes: Tensor,
    count: int,
) -> Tensor:
    """[C, tenths of t/L, CLASS_SUMS] float64; classes [t] int64, 0 to C - 1."""
    layout = ratios.layout
    position, length = layout.position.clamp(min=1), layout.length.clamp(min=1)
    tenth = ((DECILES * position - 1) // length).clamp(max=DECILES - 1)
    row = torch.where(layout.mask, classes * DECILES + tenth, count * DECILES)
    one = torch.ones((), dtype=torch.float64, device=row.device).expand(row.shape)
    movable = (given.advantages != 0).double()
    weight = movable * constrained.coefficient.double().clamp(max=1e100)
    weight = torch.where(movable == 0, 0, weight)
    log_w = ratios.prefix_sum.double() / position
    deviation = torch.expm1(ratios.token.double().clamp(max=300))
    columns = (
        one, movable, movable * constrained.inside, weight, weight.square(), log_w, log_w.square(),
        deviation.square(),
    )  # fmt: skip
    table = torch.zeros(
        count * DECILES + 1, len(CLASS_SUMS), dtype=torch.float64, device=row.device
    )
    table.index_add_(0, row, torch.stack(columns, dim=1))
    return table[:-1].view(count, DECILES, len(CLASS_SUMS))


def class_sums(updates: Sequence[Statistics]) -> Tensor:
    """[updates, C, tenths of t/L, CLASS_SUMS] float64 on the host; copies once.

    Where tokens are not reported apart they are one class, whose sums are those of the bands.
    """
    tables = [one.classes for one in updates if one.classes is not None]
    if tables:
        return torch.stack(tables).cpu()
    bands = torch.stack([one.sums.split(SIZES)[1] for one in updates]).cpu()
    tenths = bands.view(len(updates), len(BANDS), len(BAND_SUMS))[:, :DECILES]
    return (tenths @ _FROM_BANDS)[:, None]


def _counted_as(name: str) -> tuple[str, ...]:
    """The sums of a band that make one of a class."""
    match name:
        case "tokens":
            return COUNTS
        case "movable":
            return tuple(one for one in COUNTS if not one.endswith("zero"))
        case "inside":
            return "inside_positive", "inside_negative"
    return (name,)


_FROM_BANDS = torch.tensor(
    [[float(one in _counted_as(name)) for name in CLASS_SUMS] for one in BAND_SUMS],
    dtype=torch.float64,
)


def class_metrics(sums: Tensor) -> dict[str, Tensor]:
    """What sums [..., CLASS_SUMS] of some tokens say; [...] each, nan where it is over none."""
    x = dict(zip(CLASS_SUMS, sums.double().unbind(dim=-1), strict=True))
    mean = x["log_w"] / x["tokens"]
    variance = x["log_w_squared"] / x["tokens"] - mean.square()
    nothing = torch.where(x["movable"] > 0, 0.0, torch.nan)
    squares = x["movable"] * x["weight_squared"]
    return {
        "tokens": x["tokens"],
        "prefix_mean_log_std": variance.clamp(min=0).sqrt(),
        "chi_square": x["deviation_squared"] / x["tokens"],
        "acceptance": x["inside"] / x["movable"],
        # 0 where all of them were rejected.
        "effective_sample_fraction": torch.where(
            squares > 0, x["weight"].square() / squares, nothing
        ),
    }
