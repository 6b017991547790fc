"""Suggested tolerances: the rule of docs/objectives.md as one function.

The section "Which tolerances for my response length?" derives it and compares it with measurements.
"""

from megatron_rl.objectives.named import Spec
from megatron_rl.objectives.spec import Bounds, ObjectiveSpec

# log w_L is about normal around 0 with a spread s between responses, so bounds of -s and +1.36 s
# keep Phi(1.36) - Phi(-1) = 0.75 of the last tokens. 1.36 is the paper's high / low.
HIGH_OVER_LOW = 9.5e-4 / 7e-4


def suggest_tolerances(choice: Spec, *, spread: float, length: float) -> dict[str, float] | None:
    """Suggest `low` and `high` for bounds on a mean of log-ratios; None for other objectives.

    spread: standard deviation of log w_L between responses of `length` tokens in the last epoch of
    reuse (the metric `epoch_<k>/by_fraction/1.0/prefix_mean_log_std`). An unbounded side stays
    unbounded. Numbers are rounded to the rule's accuracy, two digits.
    """
    if not isinstance(choice, ObjectiveSpec) or not isinstance(choice.constraint, Bounds):
        return None
    if choice.weight not in ("prefix_mean", "sequence_mean") or not spread > 0:
        return None
    bounds = choice.constraint
    # At the last position sqrt(L/t) is 1; a tolerance times t^p is widened or narrowed by L^p.
    at_the_end = length**bounds.power if bounds.power is not None else 1.0
    sides = {"low": spread / at_the_end, "high": HIGH_OVER_LOW * spread / at_the_end}
    return {
        side: float(f"{value:.1e}")
        for side, value in sides.items()
        if getattr(bounds, side) is not None
    }
