"""The rule of docs/objectives.md: from the spread of log w_L to tolerances."""

import math
from statistics import NormalDist

import pytest

from megatron_rl.objectives import choose_objective
from megatron_rl.objectives.named import OBJECTIVE_NAMES, suggest_tolerances


def test_suggestion_keeps_about_three_quarters():
    """Phi(high / s) - Phi(-low / s), the page's formula, of what is suggested for s."""
    found = suggest_tolerances(choose_objective("pnpo", {}), spread=0.0284, length=38)
    assert found == {"low": 0.028, "high": 0.039}  # s, and 9.5 / 7 of it, in two digits
    normal = NormalDist()
    assert normal.cdf(0.039 / 0.0284) - normal.cdf(-0.028 / 0.0284) == pytest.approx(0.75, abs=0.01)


def test_tolerances_of_paper_match_its_spread():
    for spread in (0.2, 0.59, 3.0):  # as wide as the policy moves, a gate gates nothing
        found = suggest_tolerances(choose_objective("pnpo", {}), spread=spread, length=38)
        assert found == {"low": 0.2, "high": 0.27}
    found = suggest_tolerances(choose_objective("pnpo", {}), spread=7e-4, length=5000)
    assert found == {"low": 7e-4, "high": 9.5e-4}


def test_power_of_position_and_open_side_are_kept():
    widening = choose_objective("ctpo_geomean", {})  # bounds in log space times t^-0.5
    assert suggest_tolerances(widening, spread=0.01, length=100) == {"low": 0.1, "high": 0.14}
    open_below = choose_objective("gspo", {"constraint": {"low": None}})
    assert suggest_tolerances(open_below, spread=0.01, length=100) == {"high": 0.014}


def test_only_bounds_on_response_mean_depend_on_length():
    found = {
        name: suggest_tolerances(choose_objective(name, {}), spread=0.01, length=40)
        for name in OBJECTIVE_NAMES
    }
    suggested = {name for name in OBJECTIVE_NAMES if found[name]}
    assert suggested >= {"pnpo", "pnpo_one_sided", "gspo", "ctpo_geomean", "tepo_prefix"}
    weights = {choose_objective(name, {}).weight for name in suggested}
    assert weights == {"prefix_mean", "sequence_mean"}
    assert not suggested & {"grpo", "ppo", "dapo", "ctpo", "cppo", "m2po", "oapl"}
    for unknown in (0.0, math.nan):
        assert suggest_tolerances(choose_objective("pnpo", {}), spread=unknown, length=40) is None
