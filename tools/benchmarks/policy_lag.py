"""Step time and memory for each kind of policy lag, compared with a run without lag.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/policy_lag.py [--steps 8] [--prompts 16]

Short runs of the tiny task around one engine in one process (`tests/functional/lag_runs.py`), each
regime `--repeats` times in turn. Reports medians over the steps between filling and draining the
queue, in processor seconds by phase, which other load on the machine affects little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from megatron_rl.actor import groups
from megatron_rl.config import load_config
from megatron_rl.runs.rows import read_metrics
from megatron_rl.telemetry import metrics
from megatron_rl.trainer import build
from megatron_rl.trainer.recorder import Recorder
from tests.functional.lag_runs import SharedParts
from tests.functional.tiny_runs import CONFIG, PLACES, make_task

REGIMES = {
    "plain": (),
    "queue of 2": ("lag.batches=2",),
    "drawn, 0 to 2": ("lag.batches={uniform: [0, 2]}",),
    "replay of half": ("replay={capacity: 3, fresh: 0.5}",),
    "engine's log-probs": ("behavior=engine",),
    "fp8 engine": ("rollout.mismatch=fp8_e4m3",),
    "in flight, kept": ("behavior=engine", "lag.partial_rollouts=16"),
    "in flight, recompute": (
        "behavior=engine",
        "lag.partial_rollouts={every_tokens: 16, cache: recompute}",
    ),
    "in flight, recompute, actor": ("lag.partial_rollouts={every_tokens: 16, cache: recompute}",),
}
PHASES = ("rollout", "behavior", "pack", "train", "sync", "step")


def settings(folder, name, options, overrides):
    """Run the quickstart in one process, without evaluation."""
    return load_config(
        CONFIG,
        [
            *PLACES, f"run.dir={folder}", f"run.name={name}", "eval.sets={}", "parallel.context=1",
            "logging.tensorboard=false", "trainer.checkpoint_every=100",
            f"rollout.prompts_per_step={options.prompts}", f"trainer.steps={options.steps}",
            "rollout.max_num_seqs=2048", *overrides,
        ],
    )  # fmt: skip


def main():
    """Run all regimes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    make_task()
    shared = SharedParts()
    groups.initialise, build.build_engine = shared.initialise, shared.build_engine
    build.VerifierPool = shared.pool
    Recorder.draw = lambda recorder: None
    metrics.time = SimpleNamespace(perf_counter=time.process_time)
    rows: dict[str, list[dict]] = {name: [] for name in REGIMES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for number, (name, overrides) in enumerate(REGIMES.items()):
                run = f"{number}-{repeat}"
                build.run_training(settings(folder, run, options, overrides), rank=0, world_size=1)
                # Four windows: the last three steps start no new requests.
                rows[name] += read_metrics(Path(folder) / run)[4:-3]
    shared.made["pool"].__exit__(None, None, None)
    plain = {phase: median(rows["plain"], phase) for phase in PHASES}
    print(f"{'':24}" + "".join(f"{phase:>10}" for phase in PHASES) + "   peak GiB, times plain")
    for name, found in rows.items():
        seconds = {phase: median(found, phase) for phase in PHASES}
        peak = max(v for row in found for k, v in row.items() if k.startswith("memory/"))
        print(
            f"{name:24}"
            + "".join(f"{seconds[phase]:10.3f}" for phase in PHASES)
            + f"{peak:11.2f}{seconds['step'] / plain['step']:10.2f}"
        )


def median(rows, phase):
    """Return the median seconds of a phase; 0 if it does not occur."""
    return statistics.median(row.get(f"time/{phase}", 0.0) for row in rows)


if __name__ == "__main__":
    main()
