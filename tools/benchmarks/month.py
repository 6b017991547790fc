"""A month of accidents in a short time: a run of small steps, disturbed again and again.

    python -m tools.benchmarks.soak --month FOLDER [--steps 2000] [--every 50] [--only calm]

Two runs of the same settings are made in FOLDER: `calm`, which nothing disturbs, and `troubled`,
which has an accident of a random kind every `--every` steps and is started again by the same
command whenever it has ended. Every step has ten conversations with an environment. FOLDER keeps
everything, so that the same command continues where it was stopped; FOLDER/accidents.jsonl has a
row for each accident, FOLDER/resources.csv the processes, descriptors, memory and temporary files
after every 50 steps. A full disk needs a file system of its own, which root makes:

    mkdir -p FOLDER/troubled.runs && mount -t tmpfs -o size=512M month FOLDER/troubled.runs

Without one the disk is never filled. In the end, or with --compare, every metric that is no time is
compared row by row, and the digests of all checkpoints that both runs have kept.
"""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron_rl.config import dump_config, load_config
from megatron_rl.runs.files import append_row, read_metrics, read_rows
from megatron_rl.workers.broker import children_of
from tests.functional.conversation_runs import CONFIG, SHORT
from tests.functional.tiny_runs import TASK, make_task

KINDS = ("kill", "lost worker", "stopped rank", "slow disk", "moved file", "full disk")
SETTINGS = (
    f"model.path={TASK}/model", "eval.sets={}", "environment.name=tests.functional.talking:Digits",
    "environment.on_error=zero", "rollout.prompts_per_step=5", "rollout.responses_per_prompt=2",
    "rollout.max_response_tokens=12", "environment.max_turns=2", "environment.max_turn_tokens=6",
    "trainer.minibatches=1", "trainer.epochs=2", "trainer.checkpoint_every=10",
    "trainer.stall_seconds=60", "trainer.keep_every=50", "logging.sample_every=0",
    "logging.traced_responses=0", "logging.keep_rollouts=sampled", "parallel.context=1",
    "advantage.credit=response", "data.columns={prompt: question, answer: answer}",
)  # fmt: skip
COLUMNS = ("run", "step", "processes", "files", "memory_mib", "heap_mib", "temporary", "shm")
SLOW = """import os, time
_fsync = os.fsync
def fsync(file):
    if os.path.exists({flag!r}):
        time.sleep(1.0)
    return _fsync(file)
os.fsync = fsync
"""
# Differ between two runs of the same: what takes time, and what depends on when an answer arrives.
TIMES = ("time/", "memory/", "sync/", "cached", "second")


class Month:
    """One of the two runs; `accidents` are made every so many steps."""

    def __init__(self, folder: Path, name: str, *, steps: int, every: int | None) -> None:
        self.folder, self.name, self.every = folder, name, every
        self.home = folder / f"{name}.runs"
        self.run, self.config = self.home / name, folder / f"{name}.yaml"
        self.flag, self.filler = folder / f"{name}.slow", self.home / "filler"
        self.steps = steps
        self.accidents = folder / "accidents.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self._sampled, self._began = 0, 0.0
        self._prepare()

    def _prepare(self) -> None:
        """Write prompts, settings and the module that makes fsync slow, once."""
        self.flag.unlink(missing_ok=True)
        self.filler.unlink(missing_ok=True)
        if self.config.exists():
            return
        place = self.folder / self.name
        place.mkdir(parents=True)
        (place / "sitecustomize.py").write_text(SLOW.format(flag=str(self.flag)))
        rows = [{"question": f"{n}?", "answer": "7", "data_source": "month"} for n in range(64)]
        self._move(place / "prompts0.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def _move(self, data: Path, text: str) -> None:
        """Write the prompts to a file, and settings that name it."""
        data.write_text(text)
        overrides = (*SHORT, *SETTINGS, f"data.train={data}", f"run.dir={self.home}",
                     f"run.name={self.name}", f"trainer.steps={self.steps}")  # fmt: skip
        self.config.write_text(dump_config(load_config(CONFIG, list(overrides))))

    @property
    def step(self) -> int:
        """The last recorded step, read from the end of the file."""
        file = self.run / "metrics.jsonl"
        if not file.exists():
            return 0
        with file.open("rb") as rows:
            rows.seek(max(file.stat().st_size - (1 << 17), 0))
            lines = [line for line in rows.read().splitlines(keepends=True) if line[-1:] == b"\n"]
        return int(json.loads(lines[-1])["step"]) if lines else 0

    @property
    def is_done(self) -> bool:
        return (self.run / "model" / "config.json").exists()

    def go_on(self) -> None:
        """Run to the end, with accidents, and start the run again whenever it has ended."""
        failures = 0
        while not self.is_done:
            before = self.step
            with self._started():
                self._watch()
            failures = failures + 1 if self.step == before else 0
            assert failures < 5, f"{self.name} does not get on from step {before}"

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        paths = [str(self.folder / self.name), str(Path.cwd())]
        self._began = time.time()
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(self.config),
                 "run.resume=auto"], stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        try:
            yield
            status = self._process.wait()
            print(f"{self.name}: ended with {status} after step {self.step}", flush=True)
        finally:
            for process in self._processes():  # of an interrupted benchmark
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._process.wait()

    def _watch(self) -> None:
        """Make accidents until the run has ended."""
        assert self._process is not None
        while self._process.poll() is None:
            time.sleep(0.5)
            step = self.step
            if step // 50 > self._sampled // 50:
                self._sampled = step
                self._sample(step)
            count = len(read_rows(self.accidents)) if self.every else 0
            is_due = self.every and (count + 1) * self.every <= step < self.steps
            if is_due and self._records():  # not while it still loads
                self._strike(count)

    def _records(self) -> bool:
        """Return whether this start of the run has written its metrics."""
        file = self.run / "metrics.jsonl"
        return file.exists() and file.stat().st_mtime > self._began

    def _strike(self, number: int) -> None:
        """Make the accident of this number, wait until it is over, and record what it cost."""
        kinds = KINDS if os.path.ismount(self.home) else KINDS[:-1]
        # Each kind once before any comes again.
        order = random.Random(number // len(kinds)).sample(kinds, len(kinds))
        kind, chance = order[number % len(kinds)], random.Random(f"month {number}")
        step, start, size = self.step, time.monotonic(), (self.folder / f"{self.name}.log")
        offset = size.stat().st_size
        what = getattr(self, "_" + kind.replace(" ", "_"))(chance)
        assert self._process is not None
        self.flag.unlink(missing_ok=True)
        self.filler.unlink(missing_ok=True)
        has_ended = self._ends_within(90.0)
        row = {"number": number, "kind": kind, "what": what, "step": step,
               "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
        row |= {"status": self._process.returncode if has_ended else None}
        recorded, saved = self.step, self._newest_checkpoint()
        row |= {"repeated": max(recorded - saved, 0) if has_ended else 0}
        row |= {"left": len(self._processes()) if has_ended else 0}
        errors = size.read_bytes()[offset:].decode(errors="replace").splitlines()
        row |= {"lines": [line[:200] for line in errors if "megatron-rl: " in line
                          or "not saved" in line][:3]}  # fmt: skip
        append_row(self.accidents, row)
        print(row, flush=True)

    def _ends_within(self, seconds: float) -> bool:
        """Return whether the run ends; it has survived once it has recorded two further steps."""
        assert self._process is not None
        deadline, step = time.monotonic() + seconds, self.step
        while self._process.poll() is None and time.monotonic() < deadline:
            if self.step >= step + 2:
                return False
            time.sleep(0.2)
        return self._process.poll() is not None

    def _newest_checkpoint(self) -> int:
        folders = (self.run / "checkpoints").glob("step_" + "[0-9]" * 6)
        return max((int(folder.name[5:]) for folder in folders), default=0)

    # The kinds of accidents; each returns what it did.

    def _kill(self, chance: random.Random) -> str:
        time.sleep(chance.random())
        process = chance.choice(self._processes())
        name = _name(process)
        with contextlib.suppress(psutil.Error):
            process.kill()
        return f"SIGKILL of {name}"

    def _lost_worker(self, chance: random.Random) -> str:
        """Look at a template's children all along: a conversation lives for milliseconds."""
        assert self._process is not None
        templates = [one.pid for one in self._processes() if _name(one) == "template"]
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            for worker in (pid for template in templates for pid in children_of(template)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    return "SIGKILL of a conversation or verification"
        return "no conversation was found"

    def _stopped_rank(self, chance: random.Random) -> str:
        ranks = [one for one in self._processes() if _name(one) == "rank"]
        chance.choice(ranks).send_signal(signal.SIGSTOP)
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=300)
        return "SIGSTOP of a rank"

    def _slow_disk(self, chance: random.Random) -> str:
        self.flag.touch()
        self._wait_steps(15, seconds=240)  # at least one checkpoint
        return "each fsync took a second"

    def _moved_file(self, chance: random.Random) -> str:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=300)
        (old,) = (self.folder / self.name).glob("*.jsonl")
        text = old.read_text()
        old.unlink()
        self._move(old.with_name(f"moved{self.step}.jsonl"), text)
        return "stopped by SIGTERM, prompts renamed"

    def _full_disk(self, chance: random.Random) -> str:
        assert self._process is not None
        file = os.open(self.filler, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(file, bytes(1 << 12)):
                pass
        os.close(file)
        # What checkpoints need, but not what records need; or nothing at all.
        if spared := chance.choice((0, 300_000)):
            os.truncate(self.filler, max(self.filler.stat().st_size - spared, 0))
        self._wait_steps(15, seconds=240)
        return f"{spared:,} bytes left"

    def _wait_steps(self, count: int, *, seconds: float) -> None:
        assert self._process is not None
        last, deadline = self.step + count, time.monotonic() + seconds
        while self._process.poll() is None and self.step < last and time.monotonic() < deadline:
            time.sleep(0.2)

    def _processes(self) -> list[psutil.Process]:
        """The processes of the run, its command first."""
        assert self._process is not None
        mark, found = str(self.folder / self.name), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                paths = process.environ().get("PYTHONPATH", "").split(os.pathsep)
                is_own = mark in paths  # workers have the trainer's whole search path
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda one: one.pid != self._process.pid)  # type: ignore[union-attr]

    def _sample(self, step: int) -> None:
        row: Counter[str] = Counter()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                name = _name(process)
                if name == "rank":
                    parts = process.memory_maps()
                    row["heap_mib"] += sum(one.rss for one in parts if one.path == "[heap]") >> 20
                if name in ("command", "rank", "watchdog", "manager", "template"):
                    row["processes"] += 1
                    row["files"] += process.num_fds()
                    row["memory_mib"] += process.memory_full_info().pss >> 20
        temporary = Path(tempfile.gettempdir()).glob("rl_workers-*")
        row["temporary"] = sum(
            len(names) + len(files) for folder in temporary for _, names, files in os.walk(folder)
        )
        row["shm"] = len(os.listdir("/dev/shm"))
        file = self.folder / "resources.csv"
        is_new = not file.exists()
        with file.open("a", newline="") as rows:
            writer = csv.DictWriter(rows, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow({"run": self.name, "step": step, **row})


def _name(process: psutil.Process) -> str:
    """Name the part of a run that a process is; "" if it has just ended."""
    try:
        line = " ".join(process.cmdline())
        parent = process.parent()
        above = "" if parent is None else " ".join(parent.cmdline())
    except psutil.Error:
        return ""
    parts = {"runtime.watchdog": "watchdog", "environments.broker": "manager",
             "rewards.broker": "manager", "workers.template": "template"}  # fmt: skip
    found = next((name for part, name in parts.items() if part in line), "")
    if found == "template" and "workers.template" in above:
        return "worker"
    if found or "megatron_rl.cli" not in line:
        return found or "helper"  # of a library: a resource tracker, an engine's loader
    return "rank" if "megatron_rl.cli" in above else "command"


def compare(folder: Path) -> int:
    """Print the differences of both runs and what accidents cost; returns 1 if a value differs."""
    rows = [
        {row["step"]: row for row in read_metrics(folder / f"{name}.runs" / name)}
        for name in ("calm", "troubled")
    ]
    both = sorted(rows[0].keys() & rows[1].keys())
    different: Counter[str] = Counter()
    for step in both:
        calm, troubled = (row[step] for row in rows)
        for key in calm.keys() | troubled.keys():
            if not any(part in key for part in TIMES) and calm.get(key) != troubled.get(key):
                different[key] += 1
    digests = []
    for name in ("calm", "troubled"):
        files = (folder / f"{name}.runs" / name / "checkpoints").glob("step_*/trainer.json")
        found = {file.parent.name: json.loads(file.read_text())["digests"] for file in files}
        digests.append(found)
    saved = digests[0].keys() & digests[1].keys()
    unequal = sorted(name for name in saved if digests[0][name] != digests[1][name])
    print(f"{len(both):,} steps in both runs; metrics that differ: {dict(different) or 'none'}")
    print(f"{len(saved)} checkpoints in both; weights or moments differ: {unequal or 'none'}")
    accidents = read_rows(folder / "accidents.jsonl")
    for kind in KINDS:
        of_kind = [row for row in accidents if row["kind"] == kind]
        if of_kind:
            ended = [row for row in of_kind if row["status"] is not None]
            repeated = [row["repeated"] for row in of_kind]
            print(f"{kind}: {len(of_kind)}, ended the run {len(ended)} times; steps repeated: "
                  f"{sum(repeated) / len(repeated):.1f} on average, at most {max(repeated)}; "
                  f"processes left: {sum(row['left'] for row in of_kind)}")  # fmt: skip
    return int(bool(different or unequal))


def make(folder: Path, *, steps: int, every: int, only: str | None, compares: bool) -> int:
    """Make or continue the two runs, or one of them, and compare them."""
    folder.mkdir(parents=True, exist_ok=True)
    make_task()
    # The run ends with this process.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name, between in (("calm", None), ("troubled", every)):
            if not compares and only in (None, name):
                Month(folder.resolve(), name, steps=steps, every=between).go_on()
    finally:
        signal.signal(signal.SIGTERM, before)
    return compare(folder) if only is None else 0
