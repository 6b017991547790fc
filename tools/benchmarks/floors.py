"""Print the seconds of a run's phases and their floors on this machine.

    python tools/benchmarks/floors.py RUN [--step 2]

The floor of log-probs and training is the FLOPs of the matrix products over the rate that torch
reaches on products of these shapes, in the run's dtype and with its threads per process; a prompt
counts once, nothing is recomputed, and attention is not counted. Decoding needs the same products
for one token of each response at a time, and reads all weights for each; the larger of both times
is its floor. A push copies its bytes once. Run it on an idle machine, with a run of a dense model
on CPUs: the rates are measured here, one process at a time, with OMP_NUM_THREADS threads (1 unless
it is set).
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import torch
import yaml

from megatron_rl.models.shape import read_model_shape, tensor_shapes
from megatron_rl.preflight.gguf_models import find_gguf, folder_of_gguf

SIZES = ("tensor", "pipeline", "context", "data")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.float32}


@dataclass(frozen=True)
class Work:
    """Token counts of one step, over all processes."""

    prompts: int  # tokens of distinct prompts, each of which may be computed once
    responses: int  # response tokens
    trained: int  # the tokens of both that were trained on, times epochs
    trained_responses: int
    longest: int  # response, in tokens
    rows: int  # responses


def read_work(run: Path, step: int, *, epochs: int) -> Work:
    """Count the tokens of a step in the run's rollouts; those without an advantage are skipped."""
    columns = ["prompt_index", "prompt_token_ids", "token_ids", "advantage"]
    rows = pyarrow.parquet.read_table(
        run / "rollouts" / f"step_{step:06d}.parquet", columns=columns
    ).to_pylist()
    prompts = {row["prompt_index"]: len(row["prompt_token_ids"]) for row in rows}
    useful = {row["prompt_index"] for row in rows if row["advantage"]}
    trained = epochs * sum(len(row["token_ids"]) for row in rows if row["advantage"])
    return Work(
        prompts=sum(prompts.values()),
        responses=sum(len(row["token_ids"]) for row in rows),
        trained=trained + epochs * sum(prompts[index] for index in useful),
        trained_responses=trained,
        longest=max(len(row["token_ids"]) for row in rows),
        rows=len(rows),
    )


def best_seconds(act: Callable[[], object], *, seconds: float = 0.5) -> float:
    """Return the least seconds of repeated calls."""
    act()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def product_seconds(shapes: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype) -> float:
    """Measure the seconds of `tokens` rows times each of these [out, in] matrices, once."""
    total = 0.0
    for size in set(shapes):
        weight = torch.randn(size).to(dtype)
        rows = torch.randn(tokens, size[1]).to(dtype)
        total += shapes.count(size) * best_seconds(lambda r=rows, w=weight: torch.mm(r, w.t()))
    return total


def floors(work: Work, folder: Path, *, processes: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the least seconds of each phase, with the work spread evenly over the processes."""
    sizes = tensor_shapes(read_model_shape(folder))
    outer = ("model.embed_tokens.weight", "lm_head.weight")
    layers = [size for name, size in sizes.items() if len(size) == 2 and name not in outer]
    head = [next(sizes[name] for name in reversed(outer) if name in sizes)]
    many, few = 2048, -(-work.rows // processes)  # rows of a product in training, in decoding
    layer, last = (product_seconds(some, many, dtype) / many for some in (layers, head))
    decoded = sum(product_seconds(some, few, dtype) / few for some in (layers, head))
    buffer = torch.empty(1 << 26, dtype=torch.uint8)
    bandwidth = len(buffer) / best_seconds(buffer.clone)
    weights = sum(map(math.prod, [*layers, *head])) * dtype.itemsize
    share = 1 / processes
    return {
        "rollout": max(
            share * (work.prompts * layer + work.responses * decoded),
            work.longest * weights / bandwidth,
        ),
        "behavior": share * ((work.prompts + work.responses) * layer + work.responses * last),
        "train": 3 * share * (work.trained * layer + work.trained_responses * last),
        "sync": weights / bandwidth,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=2, help="Default: 2.")
    parser.add_argument("--processes", type=int, help="Default: the product of the config's sizes.")
    arguments = parser.parse_args()
    run, step = arguments.run, arguments.step
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = next(one for one in map(json.loads, lines) if one["step"] == step)
    path = Path(config["model"]["path"])
    file = find_gguf(path)
    found = floors(
        read_work(run, step, epochs=config["trainer"]["epochs"]),
        path if file is None else folder_of_gguf(file),
        processes=arguments.processes or math.prod(config["parallel"][name] or 1 for name in SIZES),
        dtype=DTYPES[config["trainer"]["dtype"]],
    )
    print("| phase | seconds | floor | times |\n|---|---|---|---|")
    for phase, least in found.items():
        seconds = row[f"time/{phase}"]
        times = f"{seconds / least:.1f}" if least else "no group has an advantage"
        print(f"| {phase} | {seconds:.2f} | {least:.2f} | {times} |")


if __name__ == "__main__":
    main()
