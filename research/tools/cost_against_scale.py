"""Draw the cost of an optimizer update against scale, with and without rollout reuse.

    python -m research.tools.cost_against_scale

Five models from 1.5B to 235B, 8 to 1,024 H100, prompts and responses of 16k to 128k tokens, the
batch of the paper (256 x 8, four minibatches). Every point is the fastest layout of a search,
estimated by formula, not measured (docs/planning.md).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.apps.planning.built_in import MODELS
from megatron_rl.apps.planning.devices import DEVICES
from megatron_rl.apps.planning.search import Option, search
from megatron_rl.apps.planning.workload import MEAN_PART, Workload

NAMES = (
    "DeepSeek-R1-Distill-Qwen-1.5B",
    "Qwen2.5-7B",
    "Qwen2.5-32B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16384, 32768, 65536, 131072)
PROMPT = 1024


@dataclass(frozen=True)
class Point:
    """The fastest layouts for one epoch and for four epochs."""

    model: str
    tokens: int
    devices: int
    layout: str
    rollout: float  # seconds, of the layout for one epoch
    once: float  # seconds of a step of one epoch
    four: float

    @property
    def ratio(self) -> float:
        """Ratio of device time per update: four epochs (16 updates) over one (4 updates)."""
        return self.four / self.once / 4

    @property
    def hours(self) -> float:
        """Device hours of 1,000 updates with one epoch."""
        return self.devices * self.once / 4 * 1000 / 3600


def points(names: tuple[str, ...]) -> Iterator[Point]:
    for name in names:
        for tokens in TOKENS:
            for devices in SIZES:
                options = search(MODELS[name], DEVICES["h100"], devices, _workload(tokens)).options
                if options:
                    best = min(options, key=lambda option: option.step_seconds)
                    reused = min(_with_epochs(option, 4) for option in options)
                    yield Point(
                        name, tokens, devices, str(best.parts), best.seconds["rollout"],
                        best.step_seconds, reused,
                    )  # fmt: skip


def _with_epochs(option: Option, epochs: int) -> float:
    """Return the seconds of a step with `epochs` times the training."""
    return option.step_seconds + (epochs - 1) * option.seconds["train"]


def _workload(tokens: int) -> Workload:
    response = tokens - PROMPT
    return Workload(
        prompts=256, samples=8, minibatches=4, epochs=1, max_prompt=PROMPT,
        max_response=response, mean_prompt=160, mean_response=round(MEAN_PART * response),
        max_num_seqs=256,
    )  # fmt: skip


def plot(found: list[Point], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "cost_against_scale"  # the same file on every run
    figure, axes = pyplot.subplots(2, len(TOKENS), figsize=(13, 6.5), sharex=True, sharey="row")
    for column, tokens in enumerate(TOKENS):
        for name in NAMES:
            line = [p for p in found if p.model == name and p.tokens == tokens]
            x = [p.devices for p in line]
            label = name.removeprefix("DeepSeek-R1-Distill-")
            axes[0, column].plot(x, [p.hours for p in line], marker=".", label=label)
            axes[1, column].plot(x, [p.ratio for p in line], marker=".", label=label)
        axes[0, column].set_title(f"{tokens // 1024}k tokens")
        axes[1, column].set_xlabel("H100")
        axes[1, column].set_xscale("log", base=2)
        axes[0, column].set_yscale("log")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("device hours of 1,000 updates,\none epoch")
    axes[1, 0].set_ylabel("an update's device time,\nfour epochs / one")
    axes[1, 0].set_ylim(0.2, 1.0)
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/assets/cost_against_scale.svg"))
    parser.add_argument(
        "--table",
        type=Path,
        help="CSV of the points; if it exists, it is read instead of running the search.",
    )
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    arguments = parser.parse_args()
    if arguments.table and arguments.table.exists():
        with arguments.table.open() as file:
            found = [
                Point(r["model"], int(r["tokens"]), int(r["devices"]), r["layout"],
                      float(r["rollout"]), float(r["once"]), float(r["four"]))
                for r in csv.DictReader(file)
            ]  # fmt: skip
    else:
        found = list(points(tuple(arguments.models)))
        if arguments.table:
            with arguments.table.open("w") as file:
                writer = csv.DictWriter(file, Point.__dataclass_fields__, lineterminator="\n")
                writer.writeheader()
                writer.writerows(vars(point) for point in found)
    for p in found:
        print(
            f"{p.model:30s} {p.tokens:7d} {p.devices:5d} {p.rollout:8.0f} {p.once:8.0f} "
            f"{p.four:8.0f} s {p.ratio:5.2f}  {p.layout}"
        )
    plot(found, arguments.out)


if __name__ == "__main__":
    main()
