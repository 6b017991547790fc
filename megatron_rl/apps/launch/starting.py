"""Submission of a checked launch: writes its folder, starts its jobs and records it."""

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from megatron_rl.apps.launch import slurm
from megatron_rl.apps.launch.cluster import SlurmCluster, plain_path
from megatron_rl.apps.launch.following import (
    Record,
    find_record,
    has_record,
    is_active,
    is_alive,
    read_exits,
)
from megatron_rl.apps.launch.launch_plan import Launch, unchecked
from megatron_rl.apps.launch.nemo import materialize, require_nemo_run, run_here, submit
from megatron_rl.apps.launch.slurm import (
    INSIDE,
    INTERRUPTED_STATUSES,
    LAUNCHER_LOG,
    inside_script,
    local_script,
    rank_script,
)
from megatron_rl.config import ConfigError, dump_config
from megatron_rl.runs.files import last_step


def preview(launch: Launch, *, offline: bool = False) -> str:
    """Return the output of `--dry-run`; all files are removed again.

    offline: use neither SLURM nor the run's folder, which may not exist on this machine.
    """
    if not offline:
        with _written(launch, keep=False):
            return _preview(launch, check=_check_script)
    with tempfile.TemporaryDirectory() as scratch:
        elsewhere = replace(launch, folder=plain_path(Path(scratch) / "launch"))
        with _written(elsewhere, keep=False):
            text = _preview(elsewhere, check=lambda launch, script: None)
    return text.replace(str(elsewhere.folder), str(launch.folder)) + "\n".join(
        ["\n=== not checked (--offline)", *unchecked(launch), ""]
    )


def _preview(launch: Launch, *, check: Callable[[Launch, str], None]) -> str:
    parts = {}
    if isinstance(launch.cluster, SlurmCluster):
        require_nemo_run()
        for number, script in enumerate(scripts := materialize(launch), start=1):
            parts[f"batch script of job {number} of {launch.chain}"] = script
        check(launch, scripts[0])
    else:
        parts["script"] = local_script(launch)
    source = launch.source
    parts |= {
        "script of each rank": rank_script(launch),
        **({"script inside its container": inside_script(launch)} if launch.apptainer else {}),
        "environment of each rank, in addition to that of sbatch": "".join(
            f"{name}={value}\n" for name, value in launch.cluster.environment.items()
        ) or "nothing\n",
        "config": dump_config(launch.config),
        "source": f"{len(source.files)} files, sha256 {source.digest}\n"
        f"commit {source.commit or 'unknown: not in a git checkout'}\n",
        "uncommitted changes, which are packaged": source.uncommitted or "none\n",
    }  # fmt: skip
    return "\n".join(f"=== {title}\n{text}" for title, text in parts.items())


def start_on_slurm(launch: Launch) -> Record:
    """Submit the launch to SLURM; a ConfigError is raised before anything is submitted."""
    _refuse_active(launch.name)
    require_nemo_run()
    with _written(launch, keep=True):
        _check_script(launch, materialize(launch)[0])
        jobs = submit(launch)
    record = Record(
        name=launch.name, run=str(launch.run_folder), folder=str(launch.folder),
        steps=launch.config.trainer.steps, jobs=jobs,
    )  # fmt: skip
    record.save()
    return record


def start_here(launch: Launch) -> Record:
    """Run the launch on this machine, in a background process that outlives this process."""
    _refuse_active(launch.name)
    require_nemo_run()
    with _written(launch, keep=True):
        pass  # no clean-up after this point: the run writes into the same folder
    process = os.fork()
    if process == 0:
        _run_in_background(launch)
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


def _check_script(launch: Launch, script: str) -> None:
    """Raise ConfigError if SLURM would reject the batch script or cannot be reached."""
    assert isinstance(launch.cluster, SlurmCluster), "only SLURM has batch scripts"
    slurm.check_cluster(launch.cluster)
    slurm.check_script(script)


@contextlib.contextmanager
def _written(launch: Launch, *, keep: bool) -> Iterator[None]:
    """Write the launch's folder; removes it unless `keep` is set and the block succeeds."""
    made = next(
        folder for folder in [launch.folder, *launch.folder.parents] if folder.parent.exists()
    )
    try:
        (launch.folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {launch.folder} cannot be created ({error.strerror}); choose another folder"
        ) from error
    try:
        launch.source.copy_to(launch.folder / "source")
        (launch.folder / "config.yaml").write_text(dump_config(launch.config), encoding="utf-8")
        (launch.folder / "source.sha256").write_text(f"{launch.source.digest}\n", encoding="utf-8")
        (launch.folder / "uncommitted.diff").write_text(launch.source.uncommitted, encoding="utf-8")
        (launch.folder / "rank.sh").write_text(rank_script(launch), encoding="utf-8")
        if launch.apptainer is not None:
            (launch.folder / INSIDE).write_text(inside_script(launch), encoding="utf-8")
        (launch.folder / "local.sh").write_text(local_script(launch), encoding="utf-8")
        yield
    except BaseException:
        shutil.rmtree(made)
        raise
    if not keep:
        shutil.rmtree(made)


def _run_in_background(launch: Launch) -> NoReturn:
    """Run the launch in the forked process and exit; errors go to launcher.log.

    No exception leaves this function, because the calling code belongs to the parent process.
    """
    status = 1
    try:
        _detach_from_terminal(launch.folder / "logs" / LAUNCHER_LOG)
        _run_until_finished(launch)
        status = 0
    except BaseException as error:  # noqa: BLE001 - logged; the process exits
        message = _describe_error(error)
        text = f"{traceback.format_exc()}megatron-rl: error: the launcher failed: {message}\n"
        os.write(2, text.encode(errors="replace"))
        _stop_run(launch)  # the run saves its step
        while _process_of_run(launch) is not None:
            time.sleep(1)
    finally:
        os._exit(status)


def _describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _detach_from_terminal(log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(target, stream)


def _run_until_finished(launch: Launch) -> None:
    """Run once, or twice with a simulated preemption; signals are forwarded to the run."""
    stop_requested = threading.Event()

    def forward(number: int, frame: object) -> None:
        stop_requested.set()
        _stop_run(launch)

    preempted = threading.Event()
    if launch.preempt_after is not None:
        threading.Thread(target=_simulate_preemption, args=(launch, preempted), daemon=True).start()
    for attempt in (1, 2):
        run_here(launch, attempt=attempt, on_start=lambda: _handle_signals(forward))
        exits = read_exits(str(launch.folder))
        was_interrupted = bool(exits) and exits[-1].status in INTERRUPTED_STATUSES
        if stop_requested.is_set() or not (preempted.is_set() and was_interrupted):
            break


def _handle_signals(handler: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, handler)  # type: ignore[arg-type]


def _stop_run(launch: Launch) -> None:
    if (process := _process_of_run(launch)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def _process_of_run(launch: Launch) -> int | None:
    """Return the process id of the run; None if it has not started or has exited."""
    try:
        process = int((launch.folder / "pid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return process if is_alive(process) else None


def _simulate_preemption(launch: Launch, preempted: threading.Event) -> None:
    assert launch.preempt_after is not None, "only started for a simulated preemption"
    first = last_step(launch.run_folder) or 0
    while (last_step(launch.run_folder) or 0) < first + launch.preempt_after:
        time.sleep(1)
    preempted.set()
    _stop_run(launch)
