"""Useful fraction and balance of the actor's packs at the paper's scale.

    PYTHONPATH=. python tools/benchmarks/packing.py

2,048 rollouts with lognormal response lengths (median 2,000, sigma 1, cut at 15,360 as a length
limit does), prompts of 200 tokens, four minibatches. Useful tokens predict something; padded is the
useful share when micro-batches of the same budget are padded to their longest sequence, in the
order of generation; balance is the busiest replica's tokens over the mean. No model runs.
"""

import time

import numpy as np

from megatron_rl.data.packing import assign_packs, padded_length

ROLLOUTS, MINIBATCHES, PROMPT, LONGEST = 2048, 4, 200, 15_360
LAYOUTS = [(8, 1, 1), (16, 2, 1), (8, 4, 1), (32, 1, 1), (4, 4, 2), (4, 8, 4)]  # dp, cp, tp
BUDGETS = [16_384, 32_768]


def make_lengths() -> np.ndarray:
    """Positions that predict something, of every rollout."""
    drawn = np.random.default_rng(0).lognormal(np.log(2000), 1.0, ROLLOUTS)
    return PROMPT + np.clip(drawn, 1, LONGEST).astype(int) - 1


def padded_share(lengths: np.ndarray, budget: int) -> float:
    """Useful share of padded micro-batches of at most `budget` tokens in the given order."""
    processed = 0
    rows: list[int] = []
    for length in [*lengths, None]:
        if length is None or (rows and max(*rows, length) * (len(rows) + 1) > budget):
            processed += max(rows) * len(rows)
            rows = []
        if length is not None:
            rows.append(length)
    return lengths.sum() / processed


def pack_minibatches(lengths: np.ndarray, *, ranks: int, alignment: int, budget: int):
    """(processed tokens of each rank in each minibatch [M, R], micro-batches of each minibatch)."""
    loads, counts = [], []
    for part in np.split(lengths, MINIBATCHES):
        padded = [padded_length(int(length), alignment=alignment) for length in part]
        packs = assign_packs(padded, budget=budget, ranks=ranks)
        counts.append(len(packs[0]))
        loads.append([sum(padded[i] for pack in rank for i in pack) for rank in packs])
    return np.array(loads), counts


def main() -> None:
    """Print the table of docs/measurements.md."""
    lengths = make_lengths()
    print(f"{ROLLOUTS} rollouts, {lengths.sum():,} tokens, median {int(np.median(lengths)):,}")
    print("| dp x cp x tp | budget | micro-batches | useful | balance | padded | planned in ms |")
    print("|---|---|---|---|---|---|---|")
    for dp, cp, tp in LAYOUTS:
        for budget in BUDGETS:
            start = time.perf_counter()
            loads, counts = pack_minibatches(
                lengths, ranks=dp, alignment=2 * cp * tp, budget=budget
            )
            spent = time.perf_counter() - start
            balance = (loads.max(axis=1) / loads.mean(axis=1)).max()
            print(
                f"| {dp} x {cp} x {tp} | {budget:,} | {max(counts)} "
                f"| {lengths.sum() / loads.sum():.4f} | {balance:.3f} "
                f"| {padded_share(lengths, budget):.3f} | {1e3 * spent:.0f} |"
            )


if __name__ == "__main__":
    main()
