"""NeMo-Run adapter: turns a launch into SLURM jobs or a local process.

Properties of NeMo-Run 0.11.1, with our workaround in parentheses: it stores its files in
NEMORUN_HOME, read at import (set to the launch's folder); it writes env_vars unquoted and in upper
case (the rank's script exports them instead); its git packager includes only committed files (the
launch copies its source itself); `retries` requeues failed jobs for any reason (the batch lines
requeue only interrupted ones); srun kills ranks 60 s after the first exit, and some options of
sbatch are written twice (`without_repeats` of its script, with `--wait=0`); srun gives every rank a
terminal (`unset SLURM_UNBUFFEREDIO`); and its exit status is 0 when jobs fail.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.apps.launch.cluster import SlurmCluster
from megatron_rl.apps.launch.launch_plan import Launch
from megatron_rl.apps.launch.slurm import batch_lines
from megatron_rl.config import ConfigError


def materialize(launch: Launch) -> list[str]:
    """Return the batch scripts that `submit` passes to sbatch, one per job of the chain."""
    with _slurm_experiment(launch) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        folder = Path(experiment._exp_dir)
        scripts = [
            (folder / f"{job.id}_sbatch.sh").read_text(encoding="utf-8") for job in experiment.jobs
        ]
    shutil.rmtree(_home(launch))
    return scripts


def without_repeats(script: str) -> str:
    """Return a batch script with each option of sbatch once, and srun's own `--wait` alone."""
    lines: list[str] = []
    for line in script.splitlines(keepends=True):
        if line.startswith("#SBATCH ") and line in lines:
            continue
        if re.match(r"srun\b.* --wait=0\b", line):
            line = line.replace(" --wait=60", "", 1)  # noqa: PLW2901
        lines.append(line)
    return "".join(lines)


@contextmanager
def _clean_scripts() -> Iterator[None]:
    """Remove repeated options from the scripts that NeMo-Run writes in the block."""
    from nemo_run.core.execution.slurm import SlurmBatchRequest

    original = SlurmBatchRequest.materialize
    SlurmBatchRequest.materialize = lambda request: without_repeats(original(request))
    try:
        yield
    finally:
        SlurmBatchRequest.materialize = original


def submit(launch: Launch) -> list[str]:
    """Submit all jobs of the chain and return their ids; ConfigError with sbatch's message."""
    try:
        with _slurm_experiment(launch) as experiment:
            experiment.run(detach=True)
            jobs = [job.handle.rpartition("/")[2] for job in experiment.jobs]
    except Exception as error:  # `invoke` raises undocumented types
        output = getattr(getattr(error, "result", None), "stderr", "").strip()
        raise ConfigError(f"sbatch refused the job: {output or error}") from error
    if not all(job.isdigit() for job in jobs):
        raise ConfigError(f"sbatch returned {jobs!r} where job ids were expected")
    return jobs


def run_here(launch: Launch, *, attempt: int, on_start: Callable[[], object]) -> None:
    """Run the launch's local script and wait for it; NeMo-Run stores its output."""
    run = _import_nemo_run(launch)
    script = str(launch.folder / "local.sh")
    with _experiment(run, launch, run.LocalExecutor(), number=attempt) as experiment:
        experiment.add(run.Script(path=script), name="train")
        experiment.run()
        on_start()  # after NeMo-Run installed its signal handlers; leaving the block waits


@contextmanager
def _slurm_experiment(launch: Launch) -> Iterator[Any]:
    """Create an experiment with the jobs of the chain, each depending on the previous one."""
    run = _import_nemo_run(launch)
    from nemo_run.core.execution.slurm import SlurmJobDetails

    cluster = launch.cluster
    assert isinstance(cluster, SlurmCluster), "only SLURM clusters have SLURM experiments"
    container = None if launch.apptainer else cluster.container
    srun = ["--wait=0", *(container.options if container else [])]
    if cluster.cpus_per_task is not None:  # srun does not take it from sbatch since SLURM 22.05
        srun.append(f"--cpus-per-task={cluster.cpus_per_task}")
    folder = str(launch.folder)
    further: dict[str, Any] = {
        key.replace("-", "_"): value for key, value in cluster.sbatch.items()
    }
    if not cluster.requeue:
        further["no_requeue"] = True
    tasks: list[str] = []
    with _clean_scripts(), _experiment(run, launch, run.LocalExecutor()) as experiment:
        for link in range(1, launch.chain + 1):
            executor = run.SlurmExecutor(
                account=cluster.account,
                job_name_prefix=f"{launch.name}.",  # otherwise NeMo-Run requires an account
                partition=cluster.partition,
                time=cluster.time_limit,
                nodes=launch.nodes,
                ntasks_per_node=cluster.processes_per_node,
                gpus_per_node=cluster.gpus_per_node,
                cpus_per_task=cluster.cpus_per_task,
                signal=f"TERM@{cluster.save_seconds}",
                container_image=container.image if container else None,
                container_mounts=[
                    *(container.mounts if container else []),
                    f"{launch.run_folder}:{launch.run_folder}",
                ],
                job_details=SlurmJobDetails(folder=f"{folder}/logs", job_name=launch.name),
                setup_lines=batch_lines(launch, requeue=cluster.requeue, link=link),
                additional_parameters=further,
                srun_args=srun,
                tunnel=run.LocalTunnel(job_dir=""),
                packager=run.Packager(),
                dependency_type="afterany",
                poll_estimated_start_time=False,
            )
            tasks.append(
                experiment.add(
                    run.Script(path=f"{folder}/rank.sh"),
                    executor=executor,
                    name=f"train-{link}",
                    dependencies=tasks[-1:],
                )
            )
        yield experiment


def _experiment(run: Any, launch: Launch, executor: Any, *, number: int = 1) -> Any:
    """Create an experiment; NeMo-Run parses its title from the id, before the last underscore."""
    return run.Experiment(
        launch.name,
        executor=executor,
        id=f"{launch.name}_{number}",
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    )


def _home(launch: Launch) -> Path:
    return launch.folder / "experiments"


def require_nemo_run() -> None:
    """Raise ConfigError if NeMo-Run is not installed."""
    if find_spec("nemo_run") is None:
        raise ConfigError(
            "NeMo-Run is not installed in this environment; it conflicts with vLLM: "
            "run tools/setup_env.sh --launcher, then .venv-launcher/bin/megatron-rl "
            f"{' '.join(sys.argv[1:2])} ..."
        )


def _import_nemo_run(launch: Launch) -> Any:
    """Import NeMo-Run with its files in the launch's folder."""
    os.environ["NEMORUN_HOME"] = str(launch.folder)
    import nemo_run as run
    from nemo_run.config import set_nemorun_home

    set_nemorun_home(str(launch.folder))
    return run
