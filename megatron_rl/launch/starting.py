"""From a checked launch to a submitted one: its folder, its jobs, its record."""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config import ConfigError, dump_config
from megatron_rl.launch import slurm
from megatron_rl.launch.cluster import SlurmCluster
from megatron_rl.launch.following import is_active, read_exits
from megatron_rl.launch.nemo import materialize, run_here, submit
from megatron_rl.launch.plan import Launch
from megatron_rl.launch.record import Record, find_record, has_record
from megatron_rl.launch.scripts import ASKED_TO_END, local_script, rank_script
from megatron_rl.runs.rows import read_metrics


def preview(launch: Launch) -> str:
    """What `--dry-run` prints; nothing stays on the disk."""
    with _written(launch, keep=False):
        parts = {}
        if isinstance(launch.cluster, SlurmCluster):
            for number, script in enumerate(_checked_scripts(launch), start=1):
                parts[f"batch script of job {number} of {launch.chain}"] = script
        else:
            parts["script"] = local_script(launch)
    source = launch.source
    parts |= {
        "script of each rank": rank_script(launch),
        "environment of each rank, beside what sbatch passes on": "".join(
            f"{name}={value}\n" for name, value in launch.cluster.environment.items()
        ) or "nothing\n",
        "config": dump_config(launch.config),
        "source": f"{len(source.files)} files, sha256 {source.digest}\n"
        f"commit {source.commit or 'unknown: not in a git checkout'}\n",
        "uncommitted changes, which are packaged": source.uncommitted or "none\n",
    }  # fmt: skip
    return "\n".join(f"=== {title}\n{text}" for title, text in parts.items())


def start_on_slurm(launch: Launch) -> Record:
    """Submit the launch; ConfigError before anything is submitted where something is wrong."""
    _refuse_active(launch.name)
    with _written(launch, keep=True):
        _checked_scripts(launch)
        jobs = submit(launch)
        record = Record(
            name=launch.name, run=str(launch.run_folder), folder=str(launch.folder),
            steps=launch.config.trainer.steps, jobs=jobs,
        )  # fmt: skip
        record.save()
    return record


def start_here(launch: Launch) -> Record:
    """Run the launch on this machine, in a process of its own that outlives this one."""
    _refuse_active(launch.name)
    with _written(launch, keep=True):
        process = os.fork()
        if process == 0:
            _leave_the_terminal(launch.folder / "logs" / "launcher.log")
            _run_to_the_end(launch)
            os._exit(0)
        record = Record(
            name=launch.name, run=str(launch.run_folder), folder=str(launch.folder),
            steps=launch.config.trainer.steps, jobs=[], process=process,
            host=socket.gethostname(),
        )  # fmt: skip
        record.save()
    return record


def _refuse_active(name: str) -> None:
    if has_record(name) and is_active(earlier := find_record(name)):
        what = f"as job {earlier.jobs[0]}" if earlier.jobs else f"as process {earlier.process}"
        raise ConfigError(
            f"{name} is active {what}; end it by `megatron-rl cancel {name}`, or choose another "
            "run.name"
        )


def _checked_scripts(launch: Launch) -> list[str]:
    assert isinstance(launch.cluster, SlurmCluster), "only SLURM has batch scripts"
    slurm.check_cluster(launch.cluster)
    scripts = materialize(launch)
    slurm.check_script(scripts[0])
    return scripts


@contextlib.contextmanager
def _written(launch: Launch, *, keep: bool) -> Iterator[None]:
    """The launch's folder on the disk; removed again if it is not kept, or what follows fails."""
    made = next(
        folder for folder in [launch.folder, *launch.folder.parents] if folder.parent.exists()
    )
    try:
        (launch.folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {launch.folder} cannot be made ({error.strerror}); choose another folder"
        ) from error
    try:
        launch.source.copy_to(launch.folder / "source")
        (launch.folder / "config.yaml").write_text(dump_config(launch.config))
        (launch.folder / "source.sha256").write_text(f"{launch.source.digest}\n")
        (launch.folder / "uncommitted.diff").write_text(launch.source.uncommitted)
        (launch.folder / "rank.sh").write_text(rank_script(launch))
        (launch.folder / "local.sh").write_text(local_script(launch))
        yield
    except BaseException:
        shutil.rmtree(made)
        raise
    if not keep:
        shutil.rmtree(made)


def _leave_the_terminal(log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(target, stream)


def _run_to_the_end(launch: Launch) -> None:
    """Once, or twice where a preemption is rehearsed; signals go on to the run, which saves."""
    asked = threading.Event()

    def pass_on(number: int, frame: object) -> None:
        asked.set()
        _end_run(launch)

    rehearsed = threading.Event()
    if launch.rehearse_after is not None:
        threading.Thread(target=_rehearse, args=(launch, rehearsed), daemon=True).start()
    for attempt in (1, 2):
        run_here(launch, attempt=attempt, on_start=lambda: _listen(pass_on))
        exits = read_exits(str(launch.folder))
        was_asked = bool(exits) and exits[-1].status in ASKED_TO_END
        if asked.is_set() or not (rehearsed.is_set() and was_asked):
            break


def _listen(handler: object) -> None:
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, handler)  # type: ignore[arg-type]


def _end_run(launch: Launch) -> None:
    file = launch.folder / "pid"
    if file.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)


def _rehearse(launch: Launch, rehearsed: threading.Event) -> None:
    assert launch.rehearse_after is not None, "started only where a rehearsal is asked for"
    first = max(len(read_metrics(launch.run_folder)), 1)  # one row is that of step 0
    while len(read_metrics(launch.run_folder)) < first + launch.rehearse_after:
        time.sleep(1)
    rehearsed.set()
    _end_run(launch)
