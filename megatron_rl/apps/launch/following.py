"""Monitoring of launches: state, output, exit status and cancellation.

Launches are recorded by run name for each user, so that they are found from any directory.
"""

import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.apps.launch import slurm
from megatron_rl.apps.launch.slurm import EXITS, INTERRUPTED_STATUSES
from megatron_rl.config import ConfigError, load_config
from megatron_rl.runs.files import LOCK, atomic_write_text, is_finished, lock_owner, read_last_rows
from megatron_rl.runtime.processes import LAUNCHER


@dataclass(frozen=True)
class Record:
    """Newest launch of a run."""

    name: str
    run: str  # the run directory
    folder: str  # folder of the launch, in the run directory
    steps: int
    jobs: list[str]  # SLURM ids in the order of the chain; empty for local runs
    process: int | None = None  # id of the launcher process of a local run
    host: str = ""

    @property
    def is_launched(self) -> bool:
        """True if `megatron-rl launch` started the run, not `megatron-rl train`."""
        return bool(self.jobs) or self.process is not None

    def save(self) -> None:
        """Write the record, replacing an earlier one with this name."""
        file = _file(self.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps(asdict(self), indent=1))


def find_record(name: str) -> Record:
    """Find the newest launch of a name, or a run of `megatron-rl train` by name or folder.

    Raises ConfigError that lists the known names.
    """
    try:
        return Record(**json.loads(_file(name).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        for run in (Path(name), Path("runs") / name):
            if (run / "config.yaml").is_file():
                steps = load_config(run / "config.yaml").trainer.steps
                path = str(run.absolute())
                return Record(name=name, run=path, folder=path, steps=steps, jobs=[])
        known = sorted(file.stem for file in _home().glob("*.json"))
        raise ConfigError(
            f"nothing was launched as {name!r}; known here: {', '.join(known) or 'nothing'}. Give "
            "the folder of a run that megatron-rl train started, as runs/NAME"
        ) from error


def has_record(name: str) -> bool:
    """Return True if a launch of this name is recorded."""
    return _file(name).exists()


def _file(name: str) -> Path:
    return _home() / f"{name}.json"


def _home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "megatron_rl" / "launches"


POLL_SECONDS = 2.0
ERROR_BYTES = 1 << 16  # size of the end of a log that is searched for the last error


@dataclass(frozen=True)
class Exit:
    """Exit of a job, as recorded by its batch script."""

    job: str
    restarts: int
    status: int


def read_exits(folder: str) -> list[Exit]:
    """Read all exits so far, oldest first; incomplete lines are ignored."""
    file = Path(folder) / EXITS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    parts = [line.split() for line in lines]
    whole = [each for each in parts if len(each) == 3 and each[1].isdigit() and each[2].isdigit()]
    return [Exit(job, int(restarts), int(status)) for job, restarts, status in whole]


def is_active(record: Record) -> bool:
    """Return True if any part of a launch is pending or running."""
    if not record.is_launched:
        return lock_owner(Path(record.run) / LOCK) is not None
    if record.process is not None:
        return _is_alive(record)
    return any(not slurm.job_state(job).has_ended for job in record.jobs)


def final_status(record: Record) -> int:
    """Return the exit status of a launch that has ended; 0 if it completed.

    A job that SLURM killed (node failure, time limit before it had saved) records no status; then
    the state of the last job in SLURM decides.
    """
    if not record.is_launched:
        return 0 if is_finished(Path(record.run), steps=record.steps) else os.EX_TEMPFAIL
    exits = read_exits(record.folder)
    if record.process is not None:
        return exits[-1].status if exits else 1
    last = slurm.job_state(record.jobs[-1])
    if last.state == "UNKNOWN":
        return exits[-1].status if exits else 1
    if last.state == "COMPLETED":
        return 0
    of_last = [each.status for each in exits if each.job == last.job and each.status]
    return of_last[-1] if of_last and last.state == "FAILED" else 1


def describe(record: Record) -> tuple[str, int]:
    """Return the output of `megatron-rl status` and its exit status, 0 unless the launch failed."""
    lines, active = [], is_active(record)
    status = 0 if active else final_status(record)
    if not record.is_launched:
        by = lock_owner(Path(record.run) / LOCK)
        state = f"RUNNING ({by})" if by else "STOPPED" if status else "COMPLETED"
        lines.append(f"{record.name}: {state}, started by megatron-rl train")
    if record.process is not None:
        state = "RUNNING" if active else ("COMPLETED" if status == 0 else "FAILED")
        where = f"process {record.process} on {record.host}"
        lines.append(f"{record.name}: {state} ({where})" + (f", status {status}" if status else ""))
    for job in record.jobs:
        lines.append(f"{record.name}: {_describe_job(slurm.job_state(job))}")
    for each in read_exits(record.folder):
        meaning = {0: "done", **dict.fromkeys(INTERRUPTED_STATUSES, "interrupted")}
        restarted = f", restarted {each.restarts} times" if each.restarts else ""
        lines.append(
            f"  job {each.job} ended with status {each.status} "
            f"({meaning.get(each.status, 'failed')}){restarted}"
        )
    lines += _describe_run(record)
    if status and not record.is_launched:
        lines.append(
            f"  continue with: megatron-rl train --config {record.run}/config.yaml run.resume=auto"
        )
    elif status:
        lines += _describe_failure(record)
    return "\n".join(lines), status


def _describe_job(state: slurm.JobState) -> str:
    reason = f" ({state.reason})" if state.reason not in ("", "None") else ""
    where = f" on {state.nodes}" if state.nodes else ""
    since = f", for {state.elapsed}" if state.elapsed not in ("", "0:00") else ""
    left = f", {state.left} left" if state.left and not state.has_ended else ""
    return f"job {state.job} {state.state}{reason}{where}{since}{left}"


def _describe_failure(record: Record) -> list[str]:
    """Return the last error of the newest log that has one, with its indented lines."""
    for file in reversed(_log_files(record)):
        with file.open("rb") as log:
            log.seek(max(file.stat().st_size - ERROR_BYTES, 0))
            text = log.read().decode(errors="replace")
        _, separator, error = text.rpartition("megatron-rl: error: ")
        if separator:
            first, *more = error.splitlines()
            further = itertools.takewhile(lambda line: line.startswith("  "), more)
            return [f"  error: {first}", *(f"  {line}" for line in further), f"  log: {file}"]
    return []


def _describe_run(record: Record) -> list[str]:
    rows = read_last_rows(Path(record.run) / "metrics.jsonl", most=1)
    lines = [f"  run directory: {record.run}"]
    if rows:
        reward = rows[-1].get("reward/mean")
        output = f", reward {reward:.3f}" if isinstance(reward, float) else ""
        lines.append(f"  step {rows[-1]['step']} of {record.steps}{output}")
    checkpoints = sorted((Path(record.run) / "checkpoints").glob("step_*"))
    if checkpoints:
        lines.append(f"  newest checkpoint: {checkpoints[-1]}")
    return lines


def read_logs(record: Record, *, follow: bool) -> Iterator[str]:
    """Yield the output of the ranks, oldest file first; `follow` continues until the end."""
    printed: dict[Path, int] = {}
    while True:
        active = follow and is_active(record)  # checked before reading, so that no output is lost
        for file in _log_files(record):
            with file.open("rb") as log:
                log.seek(printed.get(file, 0))
                text = log.read()
            if text and file not in printed:
                yield f"==> {file}\n"
            yield text.decode(errors="replace")
            printed[file] = printed.get(file, 0) + len(text)
        if not active:
            return
        time.sleep(POLL_SECONDS)


def _log_files(record: Record) -> list[Path]:
    """Return the log files, oldest first."""
    if not record.is_launched:
        return [file for file in [Path(record.run) / "log.txt"] if file.is_file()]
    files = (Path(record.folder) / "logs").glob("*")
    return sorted(files, key=lambda file: file.stat().st_mtime)


def cancel(record: Record) -> None:
    """Stop a launch: SLURM jobs are cancelled; a run on this machine saves its step first."""
    if not record.is_launched:
        _end_holder(Path(record.run))
    elif record.process is None:
        slurm.cancel_jobs(record.jobs)
    elif _is_alive(record):
        os.kill(record.process, signal.SIGTERM)


def _end_holder(run: Path) -> None:
    """Send SIGTERM to the process that trains in a folder; it forwards the signal to its ranks."""
    match = re.fullmatch(r"process (\d+) on (\S+)", lock_owner(run / LOCK) or "")
    if match is None:
        return
    if match[2] != socket.gethostname():
        raise ConfigError(f"{run} is in use by {match[0]}, not on this machine; end it there")
    variables = Path(f"/proc/{match[1]}/environ").read_bytes().split(b"\0")
    prefix = f"{LAUNCHER}=".encode()
    launcher = [each.removeprefix(prefix) for each in variables if each.startswith(prefix)]
    os.kill(int(launcher[0] if launcher else match[1]), signal.SIGTERM)


def _is_alive(record: Record) -> bool:
    assert record.process is not None, "only a launch on one machine has a process"
    if record.host != socket.gethostname():
        raise ConfigError(f"{record.name} was launched on {record.host}; run this command there")
    return is_alive(record.process)


def is_alive(process: int) -> bool:
    """Return True if a process of this machine is running; zombies do not count.

    In many containers the first process never reaps its children.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
