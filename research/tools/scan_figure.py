"""Draw what a gated delta net sends per layer under context parallelism, by formula.

    python -m research.tools.scan_figure --output research/docs/gated_delta_bytes.svg

One sequence, 16 key heads and 32 value heads of 128 (Qwen3.5-35B-A3B): bytes that a rank sends
forward for the maps of chunks in float32 (`megatron_rl/distributed/gated_delta.py`), and for an
exchange of tokens for heads in bfloat16: queries, keys, values, gates and decays before it, outputs
after.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "gated delta bytes", "svg.fonttype": "none"}
from matplotlib import pyplot as plt  # noqa: E402

KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
LENGTHS = [2**power for power in range(10, 21)]
RANKS = {2: "tab:blue", 8: "tab:orange", 32: "tab:green"}
MIB = 2**20


def bytes_of_maps(ranks: int) -> float:
    """Bytes a rank sends for maps (M, B) of its two chunks and states before the chunks."""
    numbers = SIZE * SIZE + 2 * SIZE * SIZE
    return 4 * 2 * VALUE_HEADS * (ranks - 1) / ranks * numbers


def bytes_of_tokens(length: int, ranks: int) -> float:
    """Bytes a rank sends to change tokens for heads and back."""
    row = 2 * KEY_HEADS * SIZE + 3 * VALUE_HEADS * SIZE + 2 * VALUE_HEADS
    return 2 * row * length / ranks * (ranks - 1) / ranks


def draw(output: Path) -> None:
    """Write the figure."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for ranks, color in RANKS.items():
        maps = [bytes_of_maps(ranks) / MIB] * len(LENGTHS)
        tokens = [bytes_of_tokens(length, ranks) / MIB for length in LENGTHS]
        axes.plot(LENGTHS, maps, color=color, label=f"maps of chunks, cp {ranks}")
        axes.plot(LENGTHS, tokens, color=color, ls="--", label=f"tokens for heads, cp {ranks}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB sent per rank and layer")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(output, metadata={"Date": None})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("research/docs/gated_delta_bytes.svg"))
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
