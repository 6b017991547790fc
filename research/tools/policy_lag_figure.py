"""Draw docs/assets/policy_lag.svg: when the schedule generates and trains rollout batches.

python -m research.tools.policy_lag_figure [FILE]
"""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "policy lag", "svg.fonttype": "none"}
import matplotlib.pyplot as plt  # noqa: E402

from megatron_rl.config import parse_config  # noqa: E402
from megatron_rl.rollouts.schedule import GroupBuffer, build_schedule  # noqa: E402
from megatron_rl.types import PromptGroup, PromptSlot  # noqa: E402

STEPS, GROUPS = 7, 4
REGIMES = {
    "no lag": {},
    "lag.batches: 2": {"lag": {"batches": 2}},
    "lag.policy, drawn from 0 to 2": {
        "lag": {"policy": "research.lag_policies:UniformLag", "settings": {"low": 0, "high": 2}}
    },
    "lag.sync_weights_every: 3": {"lag": {"sync_weights_every": 3}},
    "replay: {capacity: 3, fresh: 0.5}": {"replay": {"capacity": 3, "fresh": 0.5}},
    "lag.partial_rollouts, 3 windows": {"behavior": "engine", "lag": {"partial_rollouts": 10}},
}


def config_of(sections):
    """Color of each run of one group."""
    return parse_config(
        {
            "model": {"path": "m"}, "data": {"train": "t"}, "seed": 5,
            "rollout": {"prompts_per_step": GROUPS, "max_response_tokens": 30},
            "trainer": {"steps": STEPS, "minibatches": 1}, **sections,
        }
    )  # fmt: skip


def walk(schedule):
    """Return (step, generation step, times trained) of every trained group, in run order."""
    buffer = GroupBuffer(schedule)
    for step in range(1, STEPS + 1):
        for slots in buffer.missing(step):
            buffer.insert(_group(slot, step) for slot in slots)
        for group in buffer.select(step):
            yield step, group.generated_at_step, group.times_trained
        buffer.evict(step)


def _group(slot: PromptSlot, step: int) -> PromptGroup:
    return PromptGroup(slot, (), np.zeros(0), 0.0, generated_at_step=step, updates=0)


def draw(file: Path) -> None:
    """Draw one row per regime: arrows from generation to training, width by number of groups."""
    figure, axes = plt.subplots(len(REGIMES), 1, figsize=(8, 8.5), sharex=True)
    for axis, (name, sections) in zip(axes, REGIMES.items(), strict=True):
        config = config_of(sections)
        counts: dict[tuple[int, int, bool], int] = defaultdict(int)
        for step, generated, trained in walk(build_schedule(config)):
            counts[step, generated, trained > 0] += 1
        for (step, generated, again), count in counts.items():
            for window in range(config.windows):
                begun = max(1, generated - window)
                style = {"color": "C1" if again else "C0", "lw": count, "alpha": 0.6}
                axis.annotate(
                    "", (step, 0), (begun - 0.35, 1), arrowprops={"arrowstyle": "-"} | style
                )
        axis.set(ylim=(-0.25, 1.25), xlim=(0.4, STEPS + 0.4), yticks=[0, 1])
        axis.set_yticklabels(["trains", "generates"])
        axis.set_title(name, loc="left", fontsize=10, family="monospace")
        axis.plot(range(1, STEPS + 1), [0] * STEPS, "ks", ms=5)
        axis.plot([step - 0.35 for step in range(1, STEPS + 1)], [1] * STEPS, "ko", ms=5, mfc="w")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("step: first it generates (circle), then it trains (square)")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "assets" / "policy_lag.svg")
