"""Draw learning.png from reuse.parquet: mean reward over updates, a panel for each rate and reuse.

python docs/study/draw.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent
COLORS = {"pnpo": "#2f6db3", "pnpo_one_sided": "#2b9db0", "gspo": "#d9822b", "grpo": "#b3477d"}
PANELS = (("0.0004", "4"), ("0.0008", "4"), ("0.0004", "1"), ("0.0004", "8"))


def main() -> None:
    """Lines are means over seeds, bands reach from the lowest to the highest."""
    rows = pq.read_table(FOLDER / "reuse.parquet").to_pylist()
    rows = [row for row in rows if row["state"] == "done" and row["reward/mean"] is not None]
    panels = [one for one in PANELS if any(_is_of(row, one) for row in rows)]
    figure, every = plt.subplots(1, len(panels), figsize=(3.3 * len(panels), 2.9), sharey=True)
    for axis, panel in zip(every, panels, strict=True):
        for objective, color in COLORS.items():
            found: dict[int, list[float]] = {}
            for row in rows:
                if _is_of(row, panel) and row["axis/objective"] == objective:
                    # A rollout batch was generated before its own updates.
                    before = row["updates"] - row["updates"] // row["step"]
                    found.setdefault(before, []).append(row["reward/mean"])
            if not found:
                continue
            updates, values = zip(*sorted(found.items()), strict=True)
            means = [sum(one) / len(one) for one in values]
            axis.plot(updates, means, color=color, label=objective)
            axis.fill_between(updates, [min(v) for v in values], [max(v) for v in values],
                              color=color, alpha=0.15, linewidth=0)  # fmt: skip
        rate, epochs = panel
        axis.set_title(f"lr {float(rate):g}, {epochs} epoch{'s' * (epochs != '1')}", fontsize=9)
        axis.set_xlabel("updates before the batch")
        axis.grid(alpha=0.3)
    every[0].set_ylabel("mean reward of a rollout batch")
    every[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FOLDER / "learning.png", dpi=90)


def _is_of(row: dict, panel: tuple[str, str]) -> bool:
    return (row["axis/rate"], row["axis/epochs"]) == panel


if __name__ == "__main__":
    main()
