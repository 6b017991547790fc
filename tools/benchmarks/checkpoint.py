"""Bytes that each rank of a data-parallel group writes, reads and allocates for a checkpoint.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/checkpoint.py [--ranks 1 2 4]

A random Qwen2 (--hidden, --layers) in bfloat16 with its float32 optimizer: 2 + 12 bytes per
parameter. Written: the sizes of the files of a rank. Read: bytes that this process read from files
during loading (rchar of /proc/self/io). Memory: the increase of the peak resident memory.
"""

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.telemetry.peak_memory import PeakMemory
from tests.ranks import run_ranks
from tools.benchmarks.actor import make_model


def bytes_read():
    """Return the bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split("rchar:")[1].split()[0])


def measure(work):
    """Return (seconds, bytes read, increase of peak bytes) of a function call."""
    memory = PeakMemory()
    ctypes.CDLL(None).malloc_trim(0)
    memory.reset()
    held, read, start = memory.now(), bytes_read(), time.perf_counter()
    work()
    return time.perf_counter() - start, bytes_read() - read, memory.peak() - held


def save_and_load(rank, world_size, model, folder):
    """Measure (saving, loading), after a warm-up of both."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    topology = groups.initialise()
    settings = ActorSettings(warmup_updates=0, dtype=torch.bfloat16)
    actor = MegatronActor(model, topology=topology, settings=settings)
    before = actor.digest()
    actor.save(Path(folder) / "first")
    actor.load(Path(folder) / "first")
    saved = measure(lambda: actor.save(Path(folder) / "saved"))
    loaded = measure(lambda: actor.load(Path(folder) / "saved"))
    assert actor.digest() == before
    return saved, loaded


def main():
    """Print the table of docs/measurements.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        parameters = make_model(f"{root}/model", args.hidden, args.layers)
        print(
            f"{parameters:,} parameters; bytes per parameter of each rank (MiB: maximum over ranks)"
        )
        print("| data parallel | written | memory while saving | read | memory while loading | s |")
        print("|---|---|---|---|---|---|")
        for ranks in args.ranks:
            folder = Path(root) / f"dp{ranks}"
            results = run_ranks(save_and_load, ranks, f"{root}/model", str(folder))
            files = [list((folder / "saved").glob(f"__{rank}_*.distcp")) for rank in range(ranks)]
            written = [sum(file.stat().st_size for file in own) for own in files]
            columns = [
                written,
                [saved[2] for saved, _ in results],
                [loaded[1] for _, loaded in results],
                [loaded[2] for _, loaded in results],
            ]
            cells = [
                " ".join(f"{each / parameters:.1f}" for each in column)
                + f" ({max(column) / 2**20:,.0f})"
                for column in columns
            ]
            seconds = f"{max(s[0] for s, _ in results):.1f} + {max(x[0] for _, x in results):.1f}"
            print(f"| {ranks} | " + " | ".join(cells) + f" | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
