"""Fault tolerance: runs with injected faults must end exactly like an undisturbed run.

    OMP_NUM_THREADS=1 python -m research.tools.chaos [--kills 50] [--minutes 10]
        [--parts kills hangs signals damage goodput] [--seed 0] [--output FOLDER]
        [--set "lora={rank: 8, alpha: 16}" optimizer.learning_rate=8e-4]

Trains the quickstart's model with two processes, vLLM and a few responses. The real launcher is
used, with ranks forked from a process that has imported all modules. `undisturbed` is trained
first. Each part then uses its own run directory and restarts the command after each fault until the
run has finished:

kills     SIGKILL of one or both ranks, at times drawn from --seed
hangs     SIGSTOP of one rank, at times drawn from --seed, until the watchdog ends the run
signals   SIGTERM to the launcher, one to three times, seconds apart, at the start of each phase
damage    between two starts the newest checkpoint is truncated, loses a file, has one bit flipped,
          contains another's files, is half deleted, or belongs to another run
goodput   a SIGKILL every --every seconds after a start

After each part, metrics, rollouts and exported weights must equal those of the undisturbed run bit
for bit (except timings), every prompt must have been trained once per pass, and no process may
remain. The cost is the number of repeated updates and rollout batches, and seconds. --minutes
limits the duration of a part. Goodput is reported relative to the undisturbed run's seconds, and as
the fraction of the run's own seconds spent in recorded steps, which depends less on machine load.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megatron_rl.runs.checkpoints import CheckpointFolders
from megatron_rl.runs.files import read_metrics
from megatron_rl.runtime.interruption import INTERRUPTED
from research.tools.chaos_faults import (
    DAMAGE,
    count_made,
    interrupt_in_phase,
    kill_after,
    stop_after,
)
from tests.functional.faults.runs import run as run_forked

ROOT = Path(__file__).parents[2]
TASK = ROOT / ".cache" / "tiny_task"
# Timings and machine-dependent values; everything else must repeat bit for bit.
TIMED = ("time/", "memory/", "sync/", "rollout/tokens_per_second", "rollout/engine_imbalance")
SETTINGS = (
    f"model.path={TASK}/model", f"data.train={TASK}/train.parquet",
    f"eval.sets={{heldout: {TASK}/heldout.parquet}}", "eval.samples=1", "eval.every=4",
    "rollout.prompts_per_step=16", "rollout.responses_per_prompt=4", "trainer.epochs=2",
    "trainer.checkpoint_every=2", "trainer.keep_checkpoints=2", "parallel.context=1",
    "parallel.data=2", "logging.tensorboard=false", "optimizer.decay=constant",
    "run.resume=auto",
)  # fmt: skip
RANKS = 2
PHASES = ("checkpoint", "rollout", "behavior", "train", "sync", "eval", "record")


@dataclass
class Run:
    """Run directory, the command that starts or resumes it, and its cost."""

    folder: Path
    steps: int
    further: tuple[str, ...] = ()
    faults: Counter = field(default_factory=Counter)
    starts: int = 0
    seconds: float = 0.0
    ended: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command."""
        places = (f"run.dir={self.folder.parent}", f"run.name={self.folder.name}")
        return ["train", "--config", str(ROOT / "examples" / "pnpo" / "quickstart.yaml"),
                *SETTINGS, f"trainer.steps={self.steps}", *self.further, *places]  # fmt: skip

    def start(self, fault: Callable[..., None] | None = None, *, rank: int = 0) -> int:
        """Start or resume; return the exit status. fault: called in each rank beforehand."""
        self.starts += 1
        began = time.monotonic()
        found = run_forked(fault, rank, self.arguments)
        self.seconds += time.monotonic() - began
        with self.folder.with_suffix(".txt").open("a", encoding="utf-8") as printed:
            printed.write(found["output"] + f"\n-- status {found['status']}\n")
        self.problems += [f"left behind: {one}" for one in found["left"]]
        self.ended = found["status"] == 0
        return found["status"]

    def resume(self, fault: Callable[..., None] | None = None, *, rank: int = 0) -> int:
        """Start; record a problem if it ends without a request or a kill."""
        status = self.start(fault, rank=rank)
        if status not in (0, INTERRUPTED, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            printed = self.folder.with_suffix(".txt").read_text(encoding="utf-8")[-1500:]
            self.problems.append(f"a start exited with status {status}: {printed}")
        return status

    def recorded(self) -> int:
        """Return the last recorded step."""
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    def kept_seconds(self) -> float:
        """Return the seconds spent in recorded steps; repeated steps count once."""
        return sum(row.get("time/step", 0.0) for row in read_metrics(self.folder))

    def made(self, what: str) -> int:
        """Count the updates or rollout batches over all starts."""
        file = self.folder.with_suffix(".made")
        return file.read_text(encoding="utf-8").split().count(what) if file.exists() else 0


# -- comparing ------------------------------------------------------------------------------------


def compare(run: Path, whole: Path) -> Iterator[str]:
    """Yield differences from the undisturbed run and from training each prompt once per pass."""
    mine, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_metrics(folder)]
        for folder in (run, whole)
    )
    if [row["step"] for row in mine] != [row["step"] for row in theirs]:
        yield "the recorded steps differ"
    for one, other in zip(mine, theirs, strict=False):
        differ = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        if differ:
            yield f"step {one['step']} differs in {differ[:5]} ({len(differ)} metrics)"
    for folder in ("rollouts", "eval", "traces"):
        names = sorted(file.name for file in (whole / folder).glob("*.parquet"))
        if names != sorted(file.name for file in (run / folder).glob("*.parquet")):
            yield f"{folder}/ has other files"
            continue
        for name in names:
            tables = [pq.read_table(one / folder / name) for one in (run, whole)]
            if not tables[0].equals(tables[1]):
                yield f"{folder}/{name} differs"
    sums = [
        [hashlib.sha256(file.read_bytes()).hexdigest()
         for exported in ("model", "adapter")
         for file in sorted((folder / exported).glob("*.safetensors"))]
        for folder in (run, whole)
    ]  # fmt: skip
    if not sums[0] or sums[0] != sums[1]:
        yield "the exported weights differ"
    trained = Counter(
        index
        for file in (run / "rollouts").glob("*.parquet")
        for index in set(pq.read_table(file, columns=["prompt_index"])["prompt_index"].to_pylist())
    )
    if trained and max(trained.values()) - min(trained.values()) > 1:
        yield "prompts were trained different numbers of times"


# -- the parts ------------------------------------------------------------------------------------


def kill_at(run: Run, moments: Iterable[float], *, seed: int, deadline: float) -> None:
    """Send a SIGKILL at each time after a start, then run to the end."""
    random_, file = random.Random(seed), run.folder.with_suffix(".made")
    for seconds in moments:
        if run.ended or time.monotonic() > deadline:
            break
        victims, rank = random_.choice(["one", "both"]), random_.randrange(RANKS)
        run.resume(partial(kill_after, seconds, victims, file), rank=rank)
        if not run.ended:
            name = f"rank {rank}" if victims == "one" else "both ranks"
            run.faults[f"SIGKILL of {name}"] += 1
    while not run.ended and run.starts < 1000 and not run.problems:
        run.resume(partial(count_made, file))


def hang_at(run: Run, moments: Iterable[float], *, seed: int, deadline: float) -> None:
    """Stop a rank at each time after a start, which must be named, then run to the end."""
    random_, file = random.Random(seed), run.folder.with_suffix(".made")
    for seconds in moments:
        if run.ended or time.monotonic() > deadline:
            break
        rank = random_.randrange(RANKS)
        status = run.start(partial(stop_after, seconds, file), rank=rank)
        if not run.ended:
            run.faults[f"SIGSTOP of rank {rank}, status {status}"] += 1
            printed = run.folder.with_suffix(".txt").read_text(encoding="utf-8")
            found = printed.rpartition("\n-- status")[0][-3000:]
            names = [f"rank {rank} is stopped"]
            if status == 1:  # in a weight sync the others' time limit may come before the watchdog
                names = [f"rank {rank} did not join within",
                         f"from ranks [{rank}]) of", f"to ranks [{rank}]) of"]  # fmt: skip
            if status not in (1, INTERRUPTED) or not any(name in found for name in names):
                run.problems.append(f"stopped rank {rank} is not named: {printed[-1500:]}")
    while not run.ended and run.starts < 1000 and not run.problems:
        run.resume(partial(count_made, file))


def interrupt_in_turn(run: Run, *, deadline: float) -> None:
    """Send SIGTERM one to three times at the start of each phase, then run to the end."""
    file = run.folder.with_suffix(".made")
    for times in (1, 2, 3):
        for phase in PHASES:
            if run.ended or time.monotonic() > deadline:
                break
            status = run.resume(partial(interrupt_in_phase, phase, 2, times, file))
            if status != 0:
                run.faults[f"SIGTERM in {phase}, {('once', 'twice', 'thrice')[times - 1]}"] += 1
    while not run.ended and not run.problems:
        run.resume(partial(count_made, file))


def damage(run: Run, whole: Path, *, seed: int, deadline: float) -> None:
    """Stop the run every few steps, damage its newest checkpoint and resume."""
    file = run.folder.with_suffix(".made")
    for name, damage_folder in random.Random(seed).sample(list(DAMAGE.items()), len(DAMAGE)):
        if run.ended or time.monotonic() > deadline:
            break
        run.resume(partial(interrupt_in_phase, "train", 3, 1, file))
        folders = CheckpointFolders(run.folder / "checkpoints")
        intact = folders.intact_steps()
        if len(intact) < 2:
            run.problems.append(f"{name}: there are no two checkpoints to choose from")
            break
        damage_folder(folders.folder(intact[-1]), folders.folder(intact[-2]), whole)
        run.faults[f"checkpoint: {name}"] += 1
    while not run.ended and not run.problems:
        run.resume(partial(count_made, file))
    quarantined = CheckpointFolders(run.folder / "checkpoints").damaged()
    if len(quarantined) != sum(run.faults.values()):
        run.problems.append(f"{len(quarantined)} damaged checkpoints were quarantined")


def report(name: str, run: Run, whole: Run) -> dict[str, Any]:
    """Print and return one part's results."""
    if run.ended:
        run.problems += compare(run.folder, whole.folder)
    again = {what: run.made(what) - whole.made(what) for what in ("update", "batch")}
    result = "; ".join(run.problems) or "identical to the undisturbed run, bit for bit"
    if not run.ended:
        result = f"not finished in time ({run.recorded()} of {run.steps} steps); {result}"
    cells = (name, sum(run.faults.values()), again["update"], again["batch"],
             f"{run.seconds:.0f}", result)  # fmt: skip
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return {"part": name, "faults": dict(run.faults), "again": again, "starts": run.starts,
            "seconds": round(run.seconds, 1), "ended": run.ended,
            "problems": run.problems}  # fmt: skip


def run_part(part: str, whole: Run, args: argparse.Namespace, *, deadline: float) -> Run:
    """Run one part in a run directory of its own; `whole` is the undisturbed run."""
    run = Run(whole.folder.parent / part, args.steps, whole.further)
    if part == "damage":
        damage(run, whole.folder, seed=args.seed, deadline=deadline)
    elif part == "signals":
        interrupt_in_turn(run, deadline=deadline)
    else:
        random_ = random.Random(f"moments {args.seed}")
        latest = args.latest or whole.seconds / 2
        drawn = [random_.uniform(0, latest) for _ in range(args.kills)]
        if part == "hangs":
            hang_at(run, drawn, seed=args.seed, deadline=deadline)
            return run
        moments = drawn if part == "kills" else [args.every] * 1000
        kill_at(run, moments, seed=args.seed, deadline=deadline)
    return run


def print_cost(part: str, run: Run, whole: Run, *, every: float) -> None:
    """Print the goodput or the seconds lost per kill of a finished part."""
    if part == "goodput" and run.ended:
        kept = [one.kept_seconds() / one.seconds for one in (run, whole)]
        print(
            f"\ngoodput with a SIGKILL every {every:g} s after a start: "
            f"{whole.seconds / run.seconds:.0%} of the undisturbed run's; of the run's seconds "
            f"{kept[0]:.0%} were spent in recorded steps (undisturbed: {kept[1]:.0%})"
        )
    elif part == "kills" and run.ended and run.faults:
        lost = (run.seconds - whole.seconds) / sum(run.faults.values())
        print(f"\n{lost:.1f} s lost per SIGKILL, including start-up: with one per minute "
              f"{max(0.0, 1 - lost / 60):.0%} of the time is left for training\n")  # fmt: skip


def main() -> None:
    """Run the parts and print the table of docs/measurements.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", nargs="+", default=["kills", "signals", "damage", "goodput"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--latest",
        type=float,
        help="Latest kill in seconds after a start; default: half of the run.",
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--every", type=float, default=60.0, help="Seconds between kills in the goodput part."
    )
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], help="Further settings of every run.")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    root = args.output or Path(tempfile.mkdtemp(prefix="chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    importlib.import_module("tests.imported")
    whole = Run(root / "undisturbed", args.steps, tuple(args.set))
    whole.resume(partial(count_made, whole.folder.with_suffix(".made")))
    if not whole.ended:
        raise SystemExit(f"the undisturbed run failed: {whole.problems}")
    print("| run | faults | updates repeated | rollout batches repeated | seconds | result |")
    print("|---|---|---|---|---|---|", flush=True)
    lines = [report("undisturbed", whole, whole)]
    for number, part in enumerate(args.parts):
        now = time.monotonic()
        until = now + (deadline - now) / (len(args.parts) - number)
        run = run_part(part, whole, args, deadline=until)
        lines.append(report(part, run, whole))
        print_cost(part, run, whole, every=args.every)
    for line in lines:
        print(f"\n{line['part']}: {line['starts']} starts; {line['faults']}")
    (root / "chaos.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
    if any(line["problems"] for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
