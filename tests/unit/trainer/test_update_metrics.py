"""The table of a step's updates against loops in float64 over the same tokens."""

import math
import statistics

import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.actor.training import UpdateResult
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenClasses, TokenInputs, build_objective
from megatron_rl.trainer.update_metrics import UpdateMetrics, build_update_table
from megatron_rl.types import Denominators
from tests.unit.trainer.scripted import run_loop

LENGTHS, STARTS = (8, 24), ((2, 6), (10, 31))  # padded; of the tokens of each response
LAGS, BOUND = (0, 2), 0.02


def tokens(seed):
    """Log-probs, advantages and ages of two responses of 4 and 21 tokens; one has advantage 0."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(32, dtype=torch.bool)
    for start, end in STARTS:
        mask[start:end] = True
    behavior = -torch.rand(32, generator=generator, dtype=torch.float64)
    policy = behavior + 0.05 * torch.randn(32, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([0.0] * 8 + [-2.0] * 24, dtype=torch.float64)
    return mask, policy, behavior, advantages, torch.arange(32) // 5 % 2


def update(seed, *, apart):
    mask, policy, behavior, advantages, classes = tokens(seed)
    result = build_objective("pnpo", constraint={"low": BOUND, "high": BOUND})(
        TokenInputs(policy, behavior, advantages),
        layout=SequenceLayout(LENGTHS, mask),
        denominators=Denominators(2.0, 25.0),
        classes=TokenClasses(classes, 2) if apart else None,
    )
    return UpdateResult(result.statistics, 1.5, 1e-3)


def expected(seed, *, apart):
    """{(lag, decile): their row of the table}, one token at a time."""
    _, policy, behavior, advantages, classes = tokens(seed)
    cells = {}
    for start, end in STARTS:
        prefix = 0.0
        for t, place in enumerate(range(start, end), start=1):
            ratio = float(policy[place] - behavior[place])
            prefix += ratio
            reach = BOUND * math.sqrt((end - start) / t)
            weight = math.exp(prefix / t)
            tenth = max(d for d in range(10) if t / (end - start) > d / 10) + 1
            lag = LAGS[classes[place]] if apart else 0
            kept = weight if abs(weight - 1) <= reach else 0.0
            cells.setdefault((lag, tenth), []).append(
                (bool(advantages[place] != 0), kept, prefix / t, math.exp(ratio))
            )
    table = {}
    for key, cell in cells.items():
        movable = [kept for can, kept, _, _ in cell if can]
        squares = sum(kept**2 for kept in movable)
        table[key] = {
            "tokens": len(cell),
            "tokens_with_advantage": len(movable),
            "accepted": sum(kept > 0 for kept in movable),
            "acceptance": sum(kept > 0 for kept in movable) / len(movable) if movable else math.nan,
            "effective_sample_fraction": math.nan if not movable else
            sum(movable) ** 2 / (len(movable) * squares) if squares else 0.0,
            "chi_square": statistics.fmean((rho - 1) ** 2 for _, _, _, rho in cell),
            "prefix_mean_log_std": statistics.pstdev(log_w for _, _, log_w, _ in cell),
        }  # fmt: skip
    return table


@pytest.mark.parametrize("apart", [True, False])
def test_update_table_by_lag_and_decile(apart):
    """Step 5 after 40 updates, two minibatches of two groups; the third update is skipped."""
    results = [update(seed, apart=apart) for seed in range(5)]
    results[2] = UpdateResult(results[2].statistics, math.nan, 1e-3, skipped="nan")
    results[4] = UpdateResult(results[4].statistics, 1.5, 1e-3, stopped="acceptance")
    updates = UpdateMetrics(results, [1, 1, 2, 2, 3], lags=LAGS if apart else (0,))
    table = build_update_table(
        updates,
        {"step": 5, "updates": 40, "uses": [0, 0, 3, 7]},
        minibatches=2,
        first_updates={3: 22, 5: 40},
    )
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    found = {(row["update"], row["lag"], row["tenth"]): row for row in rows}
    wanted = {
        (number, *key): cell
        for number, seed in ((1, 0), (2, 1), (4, 3), (5, 4))
        for key, cell in expected(seed, apart=apart).items()
    }
    assert found.keys() == wanted.keys()
    for key, cell in wanted.items():
        assert {k: found[key][k] for k in cell} == pytest.approx(cell, rel=1e-9, nan_ok=True), key
    assert sum(row["tokens"] for row in rows) == 4 * 25
    # Made before: none, one, two (the third was skipped) and three; two steps ago were 22.
    ages = {(number, 0): age for number, age in ((1, 0), (2, 1), (4, 2), (5, 3))}
    ages |= {(number, 2): age + 18 for (number, _), age in ages.items()} if apart else {}
    assert {(row["update"], row["lag"]): row["lag_updates"] for row in rows} == ages
    # Of the second minibatch's groups, trained 3 and 7 times before, the fourth update is another.
    messages = {row["update"]: (row["epoch"], row["minibatch"], row["reuse"], row["is_made"])
            for row in rows}  # fmt: skip
    assert messages == {
        1: (1, 1, 0, True), 2: (1, 2, 5, True), 4: (2, 2, 6, True), 5: (3, 1, 1, False),
    }  # fmt: skip


def read(folder, step):
    return pq.read_table(folder / "updates" / f"step_{step:06d}.parquet").to_pylist()


def test_run_writes_table_of_each_step(tmp_path):
    """A queue of one, six updates a step: what step 3 trains is a version and six updates old."""
    run_loop(tmp_path, trainer={"steps": 3}, sections={"lag": {"batches": 1}})
    rows = read(tmp_path, 3)
    assert {(row["update"], row["lag_updates"]) for row in rows} == {
        (u, u + 5) for u in range(1, 7)
    }
    assert {(row["epoch"], row["reuse"]) for row in rows} == {(1, 0), (2, 1), (3, 2)}
    assert {(row["step"], row["lag"], row["grad_norm"]) for row in rows} == {(3, 1, 1.0)}
    # Responses of two tokens: the tenths that end at t/L 0.5 and 1.
    assert {(row["tenth"], row["tokens"]) for row in rows} == {(5, 8), (10, 8)}
    whole = pq.read_table(tmp_path / "updates")
    assert whole.num_rows == 3 * 6 * 2 and len(whole["lag_updates"].to_pylist()) == 36


def test_reuse_counts_updates_of_earlier_steps_too(tmp_path):
    """Half of each step is drawn again: of every minibatch some had three updates or more."""
    sections = {"replay": {"capacity": 2, "fresh": 0.5}}
    _, trainer = run_loop(tmp_path, trainer={"steps": 3}, sections=sections)
    last = {row["minibatch"]: row["reuse"] for row in read(tmp_path, 2) if row["epoch"] == 1}
    assert sum(last.values()) == 2 * 3 / 2  # two of four groups, three updates each
    assert {row["lag"] for row in read(tmp_path, 2)} == {0, 1}
    for row in read(tmp_path, 2):  # six updates before the step, and those of it
        assert row["lag_updates"] == row["update"] - 1 + 6 * row["lag"]
    held = trainer.run.buffer.groups.values()
    assert all(group.num_updates == 3 * group.times_trained for group in held)
