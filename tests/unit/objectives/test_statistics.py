"""Diagnostics against expected numbers, and the ratio of a first step."""

import math

import numpy as np
import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import (
    OBJECTIVE_NAMES,
    TokenInputs,
    build_objective,
    statistics,
)
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.objectives.statistics import BINS, MIDDLE, histogram_bin, histogram_quantile
from megatron_rl.types import Denominators


def evaluate(
    name,
    log_ratio,
    *,
    advantages=None,
    lengths=None,
    mask=None,
    rollout=None,
    denominators=None,
    **overrides,
):
    tokens = len(log_ratio)
    behavior = torch.full((tokens,), -1.0, dtype=torch.float64)
    lengths = lengths or [tokens]
    advantages = torch.ones(tokens) if advantages is None else advantages
    result = build_objective(name, **overrides).resolve(
        MinibatchTokens.whole(log_ratio, advantages, behavior)
    )(
        TokenInputs(
            policy_logprobs=behavior + log_ratio,
            behavior_logprobs=behavior,
            advantages=advantages,
            rollout_logprobs=None if rollout is None else behavior - rollout,
        ),
        layout=SequenceLayout(lengths, torch.ones(tokens).bool() if mask is None else mask),
        denominators=denominators
        or Denominators(responses=float(len(lengths)), tokens=float(tokens)),
    )
    return result.statistics.to_metrics()


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_ratio_of_first_step_is_exactly_one(name):
    # Behavior log-probs recomputed on the same packs: bit for bit the policy's.
    logprobs = -torch.rand(500, generator=torch.Generator().manual_seed(0))
    result = build_objective(name).resolve(
        MinibatchTokens.whole(0 * logprobs, torch.ones(500), logprobs)
    )(
        TokenInputs(
            policy_logprobs=logprobs,
            behavior_logprobs=logprobs.clone(),
            advantages=torch.ones(500),
            rollout_logprobs=logprobs - 0.01,
        ),
        layout=SequenceLayout((100, 400), torch.ones(500).bool()),
        denominators=Denominators(2.0, 500.0),
    )
    metrics = result.statistics.to_metrics()
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["ratio/prefix_mean_log_std"] == 0.0
    assert metrics["gate/acceptance"] == 1.0
    assert metrics["weight/effective_sample_fraction"] == pytest.approx(1.0, abs=1e-15)


def test_decile_includes_its_upper_end():
    # L = 10: t/L = 0.1, 0.2, ... each alone in its decile, whatever floats make of 3/10.
    table = np.zeros(10)
    for t in range(1, 11):
        log_ratio = torch.zeros(10).double()
        log_ratio[t - 1] = 1.0
        metrics = evaluate("grpo", log_ratio)
        table[t - 1] = metrics[f"by_fraction/{t / 10:.1f}/acceptance"]
    assert not table.any()


def test_rejections_are_counted_by_side_and_sign():
    # Four responses of one token: above and below, A > 0 and A < 0; a fifth inside with A > 0.
    log_ratio = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.0]).double()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    metrics = evaluate("pnpo", log_ratio, advantages=advantages, lengths=[1] * 5)
    assert metrics["gate/rejected_above_positive"] == pytest.approx(1 / 3)
    assert metrics["gate/rejected_below_positive"] == pytest.approx(1 / 3)
    assert metrics["gate/rejected_above_negative"] == pytest.approx(1 / 2)
    assert metrics["gate/rejected_below_negative"] == pytest.approx(1 / 2)
    # Weights after the gate: one of 1, four of 0: (1)^2 / (5 * 1).
    assert metrics["weight/effective_sample_fraction"] == pytest.approx(0.2)


def moves_the_policy(name):
    """Metrics that are over tokens with an advantage."""
    words = (
        "acceptance",
        "rejected",
        "effective_sample_fraction",
        "tokens_with_advantage",
        "loss/",
    )
    return any(word in name for word in words)


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_responses_without_advantage_do_not_change_gate_statistics(name):
    # Five responses, the second and the fourth of a group of equal rewards: packed, and left out.
    lengths, generator = [30, 50, 1, 20, 44], torch.Generator().manual_seed(9)
    log_ratio = [0.3 * torch.randn(n, dtype=torch.float64, generator=generator) for n in lengths]
    advantages = [1.0, 0.0, -0.5, 0.0, -2.0]
    metrics = []
    for rows in (range(5), (0, 2, 4)):
        metrics.append(
            evaluate(
                name,
                torch.cat([log_ratio[row] for row in rows]).clamp(max=0.9),
                advantages=torch.cat([torch.full((lengths[r],), advantages[r]) for r in rows]),
                lengths=[lengths[row] for row in rows],
                rollout=torch.zeros(sum(lengths[row] for row in rows)),
                denominators=Denominators(responses=5.0, tokens=float(sum(lengths))),
            )
        )
    packed, skipped = ({k: v for k, v in m.items() if moves_the_policy(k)} for m in metrics)
    if name == "oapl":  # a regression on A = 0 is a loss, too
        del packed["loss/policy"], skipped["loss/policy"]
    assert packed == pytest.approx(skipped, rel=1e-12)
    assert packed["tokens_with_advantage"] == 75 < metrics[0]["tokens"] == 145
    if name in ("pnpo", "grpo", "ppo"):
        assert packed["gate/acceptance"] < 1, "the gate must do something here"


def test_batch_without_advantages_rejects_nothing():
    metrics = evaluate("pnpo", torch.tensor([0.1, -0.1]).double(), advantages=torch.zeros(2))
    assert metrics["tokens_with_advantage"] == 0
    assert metrics["gate/acceptance"] == metrics["weight/effective_sample_fraction"] == 1
    assert metrics["gate/rejected_above_positive"] == 0
    assert "by_fraction/1.0/acceptance" not in metrics
    assert metrics["by_fraction/1.0/prefix_mean_log_mean"] == 0  # S_2 / 2, over all tokens


def test_band_counts_all_its_tokens():
    # Two responses of two tokens: t = 1 in band 2^00 and 0.5, t = 2 in 2^01 and 1.0. GRPO clips
    # rho_1 = e of the first (A > 0, above) and rho_2 = 1/e of the second (A < 0, below).
    log_ratio = torch.tensor([1.0, -0.5, 0.1, -1.0]).double()
    metrics = evaluate(
        "grpo",
        log_ratio,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        lengths=[2, 2],
        rollout=torch.tensor([0.3, 0.0, -0.1, 0.2]).double(),
    )
    for band in ("by_position/2^00", "by_fraction/0.5"):
        wanted = {
            "acceptance": 0.5,
            "rejected_above_positive": 1.0,  # of the band's one token with A > 0
            "rejected_above_negative": 0.0,
            "rejected_below_positive": 0.0,
            "rejected_below_negative": 0.0,
            "prefix_mean_log_mean": 0.55,  # log w_1 = 1.0 and 0.1
            "prefix_mean_log_std": 0.45,
            "effective_sample_fraction": 0.5,  # weights 0 and e^0.1
            "logprob_diff_mean": 0.1,
            "logprob_diff_rms": math.sqrt((0.09 + 0.01) / 2),
        }
        for name, value in wanted.items():
            assert metrics[f"{band}/{name}"] == pytest.approx(value), name
    # log w_2 = 0.25 and -0.45, whatever GRPO's own weight is: l_2 = -0.5 and -1.
    for band in ("by_position/2^01", "by_fraction/1.0"):
        assert metrics[f"{band}/rejected_below_negative"] == 1.0
        assert metrics[f"{band}/rejected_below_positive"] == 0.0
        assert metrics[f"{band}/prefix_mean_log_mean"] == pytest.approx(-0.1)
        assert metrics[f"{band}/prefix_mean_log_q95"] == pytest.approx(0.25, rel=0.25)
        assert metrics[f"{band}/prefix_mean_log_q05"] == pytest.approx(-0.45, rel=0.25)
        assert metrics[f"{band}/logprob_diff_mean"] == pytest.approx(0.1)
    assert metrics["ratio/prefix_mean_log_q95"] == pytest.approx(1.0, rel=0.25)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.1)
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(0.3)


def test_blocks_of_tokens_add_up(monkeypatch):
    # A CPU goes over the tokens in blocks: 3 at a time, the 40 tokens of three responses.
    generator = torch.Generator().manual_seed(6)
    log_ratio = 0.01 * torch.randn(40, dtype=torch.float64, generator=generator)
    given = {"lengths": [25, 1, 14], "mask": torch.rand(40, generator=generator) < 0.8}
    whole = evaluate("grpo", log_ratio, **given)
    monkeypatch.setattr(statistics, "CPU_BLOCK", 3)
    assert evaluate("grpo", log_ratio, **given) == pytest.approx(whole, rel=1e-12)
    log_ratio[given["mask"].nonzero()[-1]] = math.nan  # found in the last block
    with pytest.raises(ValueError, match="policy_logprobs at sequence 2"):
        evaluate("grpo", log_ratio, **given)


def test_drift_to_behavior_policy():
    log_ratio = torch.tensor([0.2, -0.1]).double()
    metrics = evaluate("grpo", log_ratio)
    k3 = [math.expm1(x) - x for x in (0.2, -0.1)]
    assert metrics["ratio/kl_to_behavior"] == pytest.approx(sum(k3) / 2)
    assert metrics["ratio/log_mean"] == pytest.approx(0.05)
    assert metrics["ratio/max_deviation"] == pytest.approx(math.expm1(0.2))
    # S_t / t = 0.2, 0.05.
    assert metrics["ratio/prefix_mean_log_std"] == pytest.approx(0.075)


def test_quantiles_are_right_up_to_bin():
    values = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = values * 3e-3
    counts = torch.bincount(histogram_bin(values), minlength=BINS).double()
    for quantile in (0.05, 0.25, 0.75, 0.95):
        wanted = torch.quantile(values, quantile).item()
        got = histogram_quantile(counts, quantile)
        assert 0.8 < got / wanted < 1.25  # a bin's ends differ by a factor of at most 1.25
    assert abs(histogram_quantile(counts, 0.5)) < 1e-4


def test_histogram_bins_are_symmetric_and_bounded():
    values = torch.tensor([0.0, 1e-9, -1e-9, 1e-3, -1e-3, 1e9, -1e9]).double()
    bins = (histogram_bin(values) - MIDDLE).tolist()
    assert bins[0] == bins[1] == bins[2] == 0
    assert bins[3] == -bins[4] > 0
    assert bins[5] == -bins[6] == MIDDLE


def test_micro_batch_without_decisions_adds_nothing():
    layout = SequenceLayout([4], torch.zeros(4).bool())
    result = build_objective("pnpo")(
        TokenInputs(
            policy_logprobs=torch.full((4,), math.nan),
            behavior_logprobs=torch.full((4,), math.nan),
            advantages=torch.full((4,), math.nan),
        ),
        layout=layout,
        denominators=Denominators(1.0, 1.0),
    )
    assert result.loss.tolist() == [0.0] * 4
    assert result.statistics.to_metrics()["tokens"] == 0
