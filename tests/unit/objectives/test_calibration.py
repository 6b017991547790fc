"""Bounds that reject given shares: measured on one update, applied to the next."""

import math

import numpy as np
import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.calibration import Calibration
from megatron_rl.types import Denominators
from tests.unit.objectives.mutate import mutated

SHARES = {"reject_negative": 0.5, "reject_positive": 0.02}


def evaluate(objective, log_ratios, advantages, lengths):
    """The statistics of one update, in float64."""
    behavior = torch.full_like(log_ratios, -20.0)
    return objective(
        TokenInputs(behavior + log_ratios, behavior, advantages),
        layout=SequenceLayout(lengths, torch.ones(len(log_ratios)).bool()),
        denominators=Denominators(float(len(lengths)), float(len(log_ratios))),
    ).statistics


def drifted(length, spread, *, seed=0, responses=2000):
    """Log-ratios that share a drift along each response, and advantages of both signs."""
    rng = np.random.default_rng(seed)
    drift = spread * rng.normal(-0.3, 1, (responses, 1))
    log_ratios = torch.from_numpy(drift + spread * rng.normal(0, 1, (responses, length))).view(-1)
    advantages = torch.from_numpy(rng.choice([-1.0, 0.0, 1.0], responses))
    return log_ratios, advantages.repeat_interleave(length), (length,) * responses


@pytest.mark.parametrize("name", ["pnpo", "pnpo_one_sided", "gspo", "grpo", "cispo"])
def test_next_update_rejects_shares_at_any_length_and_drift(name):
    objective = build_objective(name, constraint=SHARES)
    for length, spread in ((4, 0.3), (64, 1e-3)):
        statistics = evaluate(objective, *drifted(length, spread))
        calibration = objective.measure(statistics)
        assert calibration is not None
        new = evaluate(objective.calibrate(calibration), *drifted(length, spread, seed=1))
        found = new.to_metrics()
        assert found["gate/rejected_below_negative"] == pytest.approx(0.5, abs=0.05)
        assert found["gate/rejected_above_positive"] == pytest.approx(0.02, abs=0.01)


def test_calibration_by_hand():
    # Sequence weights of A < 0: -0.1 to -0.8. Half of them lie below -0.45, a quarter below -0.65.
    log_ratios = -torch.arange(1, 9, dtype=torch.float64) / 10
    advantages = -torch.ones(8, dtype=torch.float64)
    log_ratios = torch.cat((log_ratios, -log_ratios))
    advantages = torch.cat((advantages, -advantages))
    objective = build_objective("gspo", constraint={"reject_negative": 0.5, "reject_positive": 0})
    statistics = evaluate(objective, log_ratios, advantages, (1,) * 16)
    found = objective.measure(statistics)
    assert found.low == pytest.approx(0.45, rel=0.12) and found.high is None  # within its bin
    spec = objective.calibrate(found).spec.constraint
    assert (spec.low, spec.high, spec.space) == (found.low, None, "log")
    # Where no ratio has moved, as in the first update of a rollout batch, nothing changes.
    assert objective.measure(evaluate(objective, 0 * log_ratios, advantages, (1,) * 16)) is None
    # Where those of A < 0 rose, no bound lies above 1.
    risen = evaluate(objective, log_ratios.abs(), advantages, (1,) * 16)
    assert objective.measure(risen).low == 0


def test_position_scales_and_dual_clips_are_unchanged():
    pnpo = build_objective("pnpo", constraint=SHARES).calibrate(Calibration(0.1, 0.2))
    assert pnpo.spec.constraint.scale == "sqrt(L/t)" and pnpo.spec.constraint.low == 0.1
    grpo = build_objective("grpo", constraint=SHARES).calibrate(Calibration(0.1, 0.2))
    assert grpo.spec.constraint.dual == pytest.approx(math.log(10))
    assert grpo.calibrate(Calibration(0.3, 0.4)).spec.constraint.dual == pytest.approx(math.log(10))


def test_other_constraints_measure_nothing():
    objective = build_objective("gspo")
    statistics = evaluate(objective, *drifted(4, 0.1))
    assert objective.measure(statistics) is None and not statistics.by_sign().any()
    assert objective.calibrate(Calibration(0.1, 0.1)) is objective
    # So does one that a dry run has, whose statistics have no values.
    assert build_objective("gspo", constraint=SHARES).without_shares() == objective


@pytest.mark.parametrize(
    "constraint",
    [
        {"reject_negative": 0.5},
        {"reject_negative": 1.0, "reject_positive": 0.1},
        {"reject_negative": 0.0, "reject_positive": 0.0},
    ],
)
def test_shares_without_meaning_are_refused(constraint):
    with pytest.raises(ValueError, match="give both, at least 0 and below 1, and one above 0"):
        build_objective("gspo", constraint=constraint)


def test_statistics_of_parts_give_same_bounds():
    objective = build_objective("pnpo", constraint=SHARES)
    log_ratios, advantages, lengths = drifted(8, 0.05, responses=60)
    whole = objective.measure(evaluate(objective, log_ratios, advantages, lengths))
    parts = [
        evaluate(objective, log_ratios[8 * a : 8 * b], advantages[8 * a : 8 * b], lengths[a:b])
        for a, b in ((0, 7), (7, 60))
    ]
    assert objective.measure(parts[0].merge(parts[1])) == whole


def test_mistakes_are_caught():
    from megatron_rl.objectives import calibration, diagnostics
    from megatron_rl.objectives.objective import Objective

    mistakes = (
        (
            diagnostics._sign_rows,
            "torch.where(advantages < 0, 0,",
            "torch.where(advantages > 0, 0,",
        ),
        (calibration.measure, "1 - bounds.reject_positive", "bounds.reject_positive"),
        (calibration._quantile, "share * running[-1]", "running[-1] - share * running[-1]"),
        (Objective.weigh, "log_weight.detach() / scale", "log_weight.detach() * scale"),
    )
    for mistake in mistakes:
        with mutated(*mistake), pytest.raises(AssertionError):
            for name in ("pnpo", "gspo"):
                test_next_update_rejects_shares_at_any_length_and_drift(name)
            test_calibration_by_hand()
