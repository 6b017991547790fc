"""Conversations of eight turns, some of which misbehave: what is left, and what the others earn.

    python -m tools.benchmarks.soak [--conversations 20000] [--concurrent 64] \
        [--misbehave 0.05] [--step 1000] [--kill-every 700] [--output soak.csv]

A scripted policy talks to the real pool. The first run has no misbehaviour. In the second one a
part of the conversations does what `tests/unit/workers/troubles.py` lists (exits, hangs, crashes,
fills memory, leaves processes of all kinds). The third one is the second, whose trainer is killed
after every `--kill-every` conversations and goes on with its journal. As in a training run, each
step of `--step` conversations has a journal of its own. Printed for each: memory,
descriptors, processes and threads of the pool over time, and whether every reward of those that
behave is that of the first run, bit for bit.

With `--start 64 256 1024` it only starts as many conversations at once, and prints the milliseconds
from the first request to the last answer, the processor time and the memory for each of them.

With `--month FOLDER` whole runs have accidents of all kinds: `tools/benchmarks/month.py`.
"""

import argparse
import csv
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.config.sections import EnvironmentSection, WorkersSection
from megatron_rl.environments.interface import EnvironmentFailure
from megatron_rl.environments.pool import EnvironmentPool
from tests.unit.workers.troubles import PER_CONVERSATION, TROUBLES
from tools.benchmarks import month

SAMPLES = 20  # of the pool's resources, in a run
COLUMNS = ("run", "conversations", "seconds", "memory_mib", "files", "processes", "threads", "shm")


def row_of(number: int, misbehave: float, folder: str) -> dict[str, Any]:
    """Return the row of a conversation; which ones misbehave, and how, is a hash of the number."""
    digest = hashlib.sha256(str(number).encode()).digest()
    row: dict[str, Any] = {"name": f"row{number}"}
    if int.from_bytes(digest[:4], "big") < misbehave * 2**32:
        kind = TROUBLES[int.from_bytes(digest[4:8], "big") % len(TROUBLES)]
        row |= {"trouble": kind, "turn": 1 + digest[8] % PER_CONVERSATION, "folder": folder}
    return row


def measure(pool: EnvironmentPool) -> dict[str, Any]:
    """Return the resources of the pool's manager and of the process that it forks from."""
    broker = psutil.Process(pool._process.pid)
    below = broker.children(recursive=True)
    template = min(below, key=lambda one: one.create_time())
    own = [broker, template, psutil.Process()]
    return {
        "memory_mib": round(sum(one.memory_full_info().pss for one in own) / 2**20, 1),
        "files": sum(one.num_fds() for one in own),
        "processes": len(below),
        "threads": sum(one.num_threads() for one in own),
        "shm": len(os.listdir("/dev/shm")),
    }


LIMITS = WorkersSection(memory_gib=1.0)


def section(options: argparse.Namespace) -> EnvironmentSection:
    """Return the settings of the environment."""
    return EnvironmentSection(
        name="tests.unit.workers.troubles:Trouble", max_context_tokens=1, on_error="zero",
        time_limit_seconds=options.limit,
    )  # fmt: skip


def start_at_once(count: int, settings: EnvironmentSection) -> None:
    """Print what the first turn of each of `count` conversations costs, and its own memory."""
    with EnvironmentPool(settings, LIMITS, echo=str) as pool:
        pool.start()
        broker = psutil.Process(pool._process.pid)
        (template,) = broker.children()
        processes = [psutil.Process(), broker, template]
        before = sum(sum(one.cpu_times()[:2]) for one in processes)
        start, answered = time.monotonic(), 0
        for number in range(count):
            pool.begin(number, json.dumps({"name": f"row{number}"}), number)
            pool.send(number, "turn")
        while answered < count:
            answered += len(pool.poll(30.0))
        seconds = time.monotonic() - start
        units = template.children()
        used = sum(sum(one.cpu_times()[:2]) for one in (*processes, *units)) - before
        memory = sum(one.memory_full_info().pss for one in units) / 2**20
    print(
        f"{count:,} at once: {1000 * seconds / count:.1f} ms, {1000 * used / count:.1f} ms of "
        f"processor time, {memory / count:.1f} MiB for each"
    )


def converse(
    numbers: list[int], options: argparse.Namespace, misbehave: float, folder: Path, report: Any
) -> None:
    """Run conversations, and append number and rewards of each that has ended to `folder`."""
    steps: dict[int, list[int]] = {}
    for number in reversed(numbers):
        steps.setdefault(number // options.step, []).append(number)
    waiting: list[int] = []
    open_, rewards, ended = {}, {}, 0
    with (
        EnvironmentPool(section(options), LIMITS, echo=lambda line: None) as pool,
        (folder / "rewards.jsonl").open("a") as results,
    ):
        while steps or waiting or open_:
            if not open_ and not waiting:
                step = min(steps)
                waiting = steps.pop(step)
                pool.use_journal(folder / f"journal{step}")
            while waiting and len(open_) < options.concurrent:
                number = waiting.pop()
                row = row_of(number, misbehave, str(folder / "left"))
                pool.begin(number, json.dumps(row), number)
                open_[number], rewards[number] = 0, []
                pool.send(number, f"{number} turn 0")
            for number, result in pool.poll(30.0):
                if isinstance(result, EnvironmentFailure):
                    rewards[number].append(result.kind)
                else:
                    rewards[number].append(result.reward)
                open_[number] += 1
                if isinstance(result, EnvironmentFailure) or result.done:
                    results.write(json.dumps([number, rewards.pop(number)]) + "\n")
                    results.flush()
                    pool.end(number)
                    del open_[number]
                    ended += 1
                    report(ended, pool)
                else:
                    pool.send(number, f"{number} turn {open_[number]}")


def run(name: str, options: argparse.Namespace, misbehave: float, folder: Path, rows: Any) -> Any:
    """Run all conversations; returns the rewards of each by its number."""
    (folder / "left").mkdir(parents=True)
    start, every = time.monotonic(), max(options.conversations // SAMPLES, 1)

    def report(ended: int, pool: EnvironmentPool, before: int = 0) -> None:
        if (before + ended) % every == 0:
            values = {"run": name, "conversations": before + ended}
            values |= {"seconds": round(time.monotonic() - start), **measure(pool)}
            with options.output.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(values)
            print(values, flush=True)

    while missing := sorted(set(range(options.conversations)) - set(read(folder))):
        before = options.conversations - len(missing)
        if name != "killed":
            converse(missing, options, misbehave, folder, report)
            continue
        if (pid := os.fork()) == 0:

            def die(ended: int, pool: EnvironmentPool, before: int = before) -> None:
                report(ended, pool, before)
                if ended == options.kill_every:
                    os.kill(os.getpid(), signal.SIGKILL)

            converse(missing, options, misbehave, folder, die)
            os._exit(0)
        os.waitpid(pid, 0)
    return read(folder)


def read(folder: Path) -> dict[int, Any]:
    """Return the rewards of the conversations that have ended."""
    file = folder / "rewards.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith(b"\n"))


def main() -> int:
    """Compare the runs; returns 1 if a reward differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--misbehave", type=float, default=0.05)
    parser.add_argument("--step", type=int, default=1000)
    parser.add_argument("--kill-every", type=int, default=700)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("soak.csv"))
    parser.add_argument("--start", type=int, nargs="+", default=())
    parser.add_argument("--month", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--only", choices=("calm", "troubled"))
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.month is not None:
        return month.make(
            options.month, steps=options.steps, every=options.every, only=options.only,
            compares=options.compare,
        )  # fmt: skip
    for count in options.start:
        start_at_once(count, section(options))
    if options.start:
        return 0
    options.output.write_text(",".join(COLUMNS) + "\n")
    with tempfile.TemporaryDirectory() as place:
        runs = {
            name: run(name, options, misbehave, Path(place, name), None)
            for name, misbehave in (
                ("calm", 0.0), ("troubled", options.misbehave), ("killed", options.misbehave)
            )
        }  # fmt: skip
    calm, status = runs.pop("calm"), 0
    for name, found in runs.items():
        rows = [row_of(number, options.misbehave, "") for number in found]
        good = [number for number, row in zip(found, rows, strict=True) if "trouble" not in row]
        different = [number for number in good if found[number] != calm[number]]
        ends: dict[str, int] = {}
        for number in set(found) - set(good):
            end = str(found[number][-1]) if isinstance(found[number][-1], str) else "answered"
            ends[end] = ends.get(end, 0) + 1
        print(f"{name}: {len(good):,} behaved, {len(different)} with other rewards; others: {ends}")
        status |= bool(different)
    for number, rewards in runs["troubled"].items():
        if (other := runs["killed"][number]) != rewards:
            trouble = row_of(number, options.misbehave, "").get("trouble")
            print(f"{number} ({trouble}): {rewards} became {other} in the killed run")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
