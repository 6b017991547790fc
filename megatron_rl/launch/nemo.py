"""NeMo-Run: from a launch to sbatch scripts and jobs, or to a process of this machine.

Facts of NeMo-Run 0.11.1 that this file answers: it keeps its files below NEMORUN_HOME, read at
import (set to the launch's folder); it puts env_vars unquoted and upper-cased into the script
(the rank's script exports them instead); its git packager takes committed files only (the launch
copies its source itself); with `retries` it requeues a job that failed, whatever the reason (the
batch lines requeue what was asked to end); srun ends ranks 60 s after the first one has ended
(`--wait=0`); it has srun give every rank a terminal (`unset SLURM_UNBUFFEREDIO`); and its own
exit status is 0 when jobs fail.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.launch.cluster import SlurmCluster
from megatron_rl.launch.plan import Launch
from megatron_rl.launch.scripts import batch_lines


def materialize(launch: Launch) -> list[str]:
    """The batch scripts that `submit` hands to sbatch, one for each job of the chain."""
    with _slurm_experiment(launch) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        folder = Path(experiment._exp_dir)
        scripts = [(folder / f"{job.id}_sbatch.sh").read_text() for job in experiment.jobs]
    shutil.rmtree(_home(launch))
    return scripts


def submit(launch: Launch) -> list[str]:
    """Submit all jobs of the chain and return their ids; ConfigError with what sbatch said."""
    try:
        with _slurm_experiment(launch) as experiment:
            experiment.run(detach=True)
            jobs = [job.handle.rpartition("/")[2] for job in experiment.jobs]
    except Exception as error:  # of `invoke`, whose types are NeMo-Run's own affair
        said = getattr(getattr(error, "result", None), "stderr", "").strip()
        raise ConfigError(f"sbatch refused the job: {said or error}") from error
    if not all(job.isdigit() for job in jobs):
        raise ConfigError(f"sbatch answered {jobs!r} where ids of jobs were expected")
    return jobs


def run_here(launch: Launch, *, attempt: int, on_start: Callable[[], object]) -> None:
    """Run the launch's local script to its end; its output goes where NeMo-Run keeps it."""
    run = _import_nemo_run(launch)
    script = str(launch.folder / "local.sh")
    with _experiment(run, launch, run.LocalExecutor(), number=attempt) as experiment:
        experiment.add(run.Script(path=script), name="train")
        experiment.run()
        on_start()  # after NeMo-Run took the signals for itself; leaving the block waits


@contextmanager
def _slurm_experiment(launch: Launch) -> Iterator[Any]:
    """An experiment that holds the jobs of the chain, each after the one before it."""
    run = _import_nemo_run(launch)
    from nemo_run.core.execution.slurm import SlurmJobDetails

    cluster = launch.cluster
    assert isinstance(cluster, SlurmCluster), "the caller asks for SLURM on SLURM only"
    container = cluster.container
    folder = str(launch.folder)
    further: dict[str, Any] = {
        key.replace("-", "_"): value for key, value in cluster.sbatch.items()
    }
    if not cluster.requeue:
        further["no_requeue"] = True
    tasks: list[str] = []
    with _experiment(run, launch, run.LocalExecutor()) as experiment:
        for link in range(1, launch.chain + 1):
            executor = run.SlurmExecutor(
                account=cluster.account,
                job_name_prefix=f"{launch.name}.",  # without one it reads the account
                partition=cluster.partition,
                time=cluster.time_limit,
                nodes=launch.nodes,
                ntasks_per_node=cluster.processes_per_node,
                gpus_per_node=cluster.gpus_per_node,
                signal=f"TERM@{cluster.save_seconds}",
                container_image=container.image if container else None,
                container_mounts=[
                    *(container.mounts if container else []),
                    f"{launch.run_folder}:{launch.run_folder}",
                ],
                job_details=SlurmJobDetails(folder=f"{folder}/logs", job_name=launch.name),
                setup_lines=batch_lines(launch, requeue=cluster.requeue, link=link),
                additional_parameters=further,
                srun_args=["--wait=0"],
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
    """NeMo-Run finds an experiment's title in its id, before the last underscore."""
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


def _import_nemo_run(launch: Launch) -> Any:
    """The library, with its files below the launch's folder; ConfigError where it is missing."""
    os.environ["NEMORUN_HOME"] = str(launch.folder)
    try:
        import nemo_run as run
        from nemo_run.config import set_nemorun_home
    except ModuleNotFoundError as error:
        if error.name != "nemo_run":
            raise
        raise ConfigError(
            "NeMo-Run is not installed in this environment, whose vLLM it cannot live with: "
            "run tools/setup_env.sh --launcher, then .venv-launcher/bin/megatron-rl "
            f"{' '.join(sys.argv[1:2])} ..."
        ) from error
    set_nemorun_home(str(launch.folder))
    return run
