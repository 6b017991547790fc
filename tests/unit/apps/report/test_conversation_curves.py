"""Curves of conversations on the page: only where a run has them, rewards by turns in order."""

from types import SimpleNamespace

from megatron_rl.apps.report.build import CURVES, _curves


def test_curves_of_runs_without_conversations_are_unchanged():
    assert _curves([SimpleNamespace(rows=[{"reward/mean": 1.0}])]) == CURVES


def test_curves_have_rewards_by_turns_of_all_runs():
    rows = [{"conversation/turns_mean": 2.0, "reward_by_turns/10": 0.0, "reward_by_turns/2": 1.0}]
    runs = [SimpleNamespace(rows=rows), SimpleNamespace(rows=[{"reward_by_turns/1": 0.5}])]
    assert list(_curves(runs))[len(CURVES) :] == [
        "conversation/turns_mean", "reward_by_turns/1", "reward_by_turns/2",
    ]  # fmt: skip
    assert _curves(runs)["reward_by_turns/1"] == "Reward of conversations of 1 turn"
    assert _curves(runs)["reward_by_turns/2"] == "Reward of conversations of 2 turns"
