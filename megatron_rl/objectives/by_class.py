"""How a constraint and its weights do in classes of tokens, by tenths of the response.

A class is what the caller says, the lag of a token for instance. Only sums, which merge over
micro-batches and ranks. Shapes: t tokens on this rank, C classes.
"""

import math

import torch
from torch import Tensor

from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.statistics import CLASS_SUMS, DECILES
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


def class_metrics(sums: Tensor) -> dict[str, float]:
    """What [CLASS_SUMS] of some tokens say; nothing where there are none."""
    x = dict(zip(CLASS_SUMS, sums.tolist(), strict=True))
    if not x["tokens"]:
        return {}
    mean = x["log_w"] / x["tokens"]
    variance = max(x["log_w_squared"] / x["tokens"] - mean * mean, 0.0)
    metrics = {
        "tokens": x["tokens"],
        "prefix_mean_log_std": math.sqrt(variance),
        "chi_square": x["deviation_squared"] / x["tokens"],
    }
    if x["movable"]:
        metrics["acceptance"] = x["inside"] / x["movable"]
        squares = x["movable"] * x["weight_squared"]
        metrics["effective_sample_fraction"] = x["weight"] ** 2 / squares if squares else 0.0
    return metrics
