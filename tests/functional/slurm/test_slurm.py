"""A tiny training on a real SLURM, launched by NeMo-Run: over two nodes, through everything that
may happen to it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from megatron_rl.runs.files import read_metrics
from tests.functional.debian import missing
from tests.functional.slurm.throwaway import PACKAGES, PROGRAMS, ThrowawaySlurm
from tests.functional.tiny_runs import ROOT, TASK, TRAIN, make_task

pytestmark = pytest.mark.slow
LAUNCHER = ROOT / ".cache" / "launcher"
STEPS = 32  # so many that a paced run cannot end by itself
DEADLINE = 600.0


class Launcher:
    """`megatron-rl` as a user has it on a login node, in the launcher's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"),
        }  # fmt: skip
        (folder / "tiny.yaml").write_text(json.dumps({
            "model": {"path": str(TASK / "model")},
            "data": {"train": str(TRAIN), "max_prompt_tokens": 48},
            "parallel": {"context": 2},
            "rollout": {"prompts_per_step": 4, "responses_per_prompt": 2, "max_response_tokens": 40,
                        "kv_cache_mib": 16, "max_num_seqs": 8},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
            "trainer": {"steps": STEPS, "epochs": 1, "minibatches": 1, "checkpoint_every": 1000,
                        "tokens_per_micro_batch": 1024},
            "reward": {"verifier": "paced:score", "time_limit_seconds": 30},
            "logging": {"tensorboard": False},
            "run": {"dir": "runs"},
        }))  # fmt: skip
        cluster = {
            "python": sys.executable,
            "environment": {
                "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
                "ODD": "two words, $HOME, 'quotes' and `date`",
            },
        }  # fmt: skip
        slurm = {
            "partition": "low", "time_limit": "00:30:00", "nodes": 2, "processes_per_node": 1,
            "save_seconds": 300,
        }  # fmt: skip
        self.write_cluster("slurm", {"executor": "slurm", **cluster, **slurm})
        self.write_cluster("local", {"executor": "local", **cluster})

    def write_cluster(self, name: str, values: dict) -> None:
        (self.folder / f"{name}.yaml").write_text(json.dumps(values))

    def __call__(
        self,
        *arguments: str,
        status: int = 0,
        cwd: Path | None = None,
        module: str = "megatron_rl.cli",
    ) -> str:
        done = subprocess.run(
            [str(LAUNCHER / "bin" / "python"), "-m", module, *arguments],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def pace(self, name: str, seconds: float) -> Path:
        """Delay every grade of a run by these seconds, until the file is removed."""
        (file := self.run_folder(name) / "pace").parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(seconds))
        return file

    def start(self, name: str, *more: str, cluster: str = "slurm") -> str:
        """Launch; returns the ids of its jobs, with commas between them."""
        self("launch", "tiny.yaml", "--cluster", f"{cluster}.yaml", f"run.name={name}", *more)
        record = json.loads(next(self.folder.glob(f"state/**/{name}.json")).read_text())
        return ",".join(record["jobs"])

    def exits(self, name: str) -> list[str]:
        """The statuses of its jobs' ends so far."""
        files = self.run_folder(name).glob("launch/*/exits")
        return [line.split()[2] for file in files for line in file.read_text().splitlines()]

    def wait_until(self, what: str, is_so, name: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not is_so():
            if time.monotonic() > deadline:
                pytest.fail(f"not {what} in {DEADLINE} s\n{self('logs', name)[-5000:]}")
            time.sleep(0.2)

    def weights(self, name: str) -> dict:
        return load_file(self.run_folder(name) / "model" / "model.safetensors")

    def assert_whole(self, name: str) -> None:
        """A run has the weights of an undisturbed one, which is launched where nobody has."""
        if not self.run_folder("whole").exists():
            self.start("whole", cluster="slurm" if "SLURM_CONF" in os.environ else "local")
        self("logs", "-f", "whole")
        assert self.exits("whole") == ["0"] and steps_of(self.run_folder("whole")) == STEPS
        assert steps_of(self.run_folder(name)) == STEPS
        one, other = self.weights(name), self.weights("whole")
        assert one.keys() == other.keys()
        assert all(tensor.equal(other[key]) for key, tensor in one.items())


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    if reason := missing(PROGRAMS, packages=PACKAGES):
        pytest.skip(f"no SLURM here: {reason}")
    with ThrowawaySlurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def slurm(started):
    """Without anything of an earlier test, even of one that has failed."""
    yield started
    started.clear()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    made = subprocess.run(
        ["bash", "tools/setup_env.sh", "--launcher"],
        cwd=ROOT,
        env=os.environ | {"MEGATRON_RL_LAUNCHER_VENV": str(LAUNCHER)},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"NeMo-Run cannot be installed here: {made.stdout[-300:]}{made.stderr[-300:]}")
    make_task()
    folder = tmp_path_factory.mktemp("launches")
    (folder / "paced.py").write_text((Path(__file__).parent / "paced.py").read_text())
    return Launcher(folder)


def steps_of(run: Path) -> int:
    rows = read_metrics(run)
    return rows[-1]["step"] if rows else -1


def test_cluster_has_two_nodes(slurm, launcher):
    """First: no other test's time limit contains the minutes of installing SLURM and NeMo-Run."""
    assert set(slurm.ask("sinfo -h -N -o %N").split()) == {"n1", "n2"}


def test_run_survives_preemption_time_limit_and_node_failure(slurm, launcher):
    """Preempted, out of time, its node lost: in the end the weights of an undisturbed run."""
    run, pace = launcher.run_folder("disturbed"), launcher.pace("disturbed", 1.0)
    job = launcher.start("disturbed")
    state = lambda: slurm.ask(f"squeue -h -t all -j {job} -o %T")  # noqa: E731
    launcher.wait_until("at step 2", lambda: steps_of(run) >= 2, "disturbed")

    # A job of the other partition takes both nodes.
    slurm.ask(f"sbatch -p high -N 2 --exclusive -o {run}/high.out --wrap hostname")
    launcher.wait_until("preempted", lambda: launcher.exits("disturbed")[:1] == ["75"], "disturbed")
    (saved,) = (run / "checkpoints").iterdir()
    saved = int(saved.name.removeprefix("step_"))  # this step, or all that was trained of it
    assert saved >= 2
    launcher.wait_until("going on", lambda: steps_of(run) > saved, "disturbed")

    # Its time limit comes near. SLURM checks limits every 30 s, and with five minutes left or
    # less it signals. In the meantime an undisturbed run has the nodes' other cores.
    minutes = int(slurm.ask(f"squeue -h -j {job} -o %M").split(":")[0])
    slurm.ask(f"scontrol update jobid={job} timelimit={minutes + 5}")
    launcher.start("whole")
    assert "disturbed is active as job" in launcher(
        "launch", "tiny.yaml", "--cluster", "slurm.yaml", "run.name=disturbed", "run.resume=auto",
        status=1,
    )  # fmt: skip
    launcher.wait_until(
        "out of time", lambda: launcher.exits("disturbed")[1:2] == ["75"], "disturbed"
    )
    slurm.ask(f"scontrol update jobid={job} timelimit=30")

    # A node is lost: what was not saved is done again.
    launcher("logs", "-f", "whole")
    launcher.wait_until("started again", lambda: state() == "RUNNING", "disturbed")
    slurm.kill_node("n2")
    pace.unlink()
    # Only when the node counts as down: messages to it wait until then, and would be sent
    # to the next start of the job.
    launcher.wait_until("without its node", lambda: state() == "PENDING", "disturbed")
    slurm.start_node("n2")

    assert "job" in launcher("logs", "-f", "disturbed", cwd=Path("/"))
    assert "COMPLETED" in launcher("status", "disturbed", cwd=Path("/"))
    launcher.assert_whole("disturbed")
    assert re.search(f"continuing disturbed (after|in) step {saved}", (run / "log.txt").read_text())
    assert "ODD=two words" in (run / "launch" / "001" / "rank.sh").read_text().replace("'", "")


def test_chain_of_jobs_with_engines_on_a_node_of_their_own_resumes(slurm, launcher):
    """The first of two jobs is interrupted after two steps, and none is queued again.

    One node trains and the other generates; in the end the weights of one shared process, which is
    launched on this machine and interrupted, too.
    """
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    launcher.write_cluster("once", values | {"requeue": 0})
    settings = ("parallel.context=1", "lag.batches=1", "trainer.steps=8", "--simulate-preemption=2")
    run, pace = launcher.run_folder("apart"), launcher.pace("apart", 1.0)
    launcher.start("apart", *settings, "parallel.engine_ranks=1", "--chain", "2", cluster="once")
    launcher.wait_until("interrupted", lambda: launcher.exits("apart"), "apart")
    pace.unlink()
    launcher.wait_until("at its end", lambda: len(launcher.exits("apart")) == 2, "apart")
    assert launcher.exits("apart") == ["75", "0"]
    assert "checkpoint saved at step" in (run / "log.txt").read_text()
    pace = launcher.pace("shared", 0.3)
    launcher.start("shared", *settings, cluster="local")
    launcher.wait_until("interrupted", lambda: launcher.exits("shared"), "shared")
    pace.unlink()
    launcher("logs", "-f", "shared")
    assert "COMPLETED" in launcher("status", "shared")
    assert launcher.exits("shared") == ["75", "0"]
    one, other = launcher.weights("apart"), launcher.weights("shared")
    assert one.keys() == other.keys() and steps_of(run) == 8
    assert all(tensor.equal(other[key]) for key, tensor in one.items())


def test_hung_job_is_requeued_and_ends_as_undisturbed_job(slurm, launcher):
    """One of two nodes' ranks is stopped: the watchers end both, and nobody starts it by hand."""
    run, pace = launcher.run_folder("hung"), launcher.pace("hung", 1.0)
    launcher.start("hung", "trainer.stall_seconds=45", "trainer.checkpoint_every=2")
    launcher.wait_until("at step 3", lambda: steps_of(run) >= 3, "hung")
    rank = min(slurm.processes("n2", of="megatron_rl.cli\0train"))  # not one that it has forked
    os.kill(rank, signal.SIGSTOP)
    pace.unlink()
    launcher.wait_until("ended by its watchers", lambda: launcher.exits("hung") == ["75"], "hung")
    reports = [file.read_text().splitlines()[0] for file in (run / "stalls").iterdir()]
    assert any("rank 1 is stopped" in report for report in reports), reports
    assert "job" in launcher("logs", "-f", "hung")
    assert launcher.exits("hung") == ["75", "0"]
    launcher.assert_whole("hung")
    print(*reports, launcher("logs", "hung"), sep="\n")


def test_cancelled_job_is_not_requeued(slurm, launcher):
    jobs = launcher.start("cancelled", "--chain", "2")
    states = lambda: set(slurm.ask(f"squeue -h -t all -j {jobs} -o %T").split())  # noqa: E731
    launcher.wait_until("running", lambda: "RUNNING" in states(), "cancelled")
    launcher("cancel", "cancelled")
    launcher.wait_until("cancelled", lambda: states() == {"CANCELLED"}, "cancelled")
    output = launcher("status", "cancelled", status=1)
    assert output.count("CANCELLED") == 2, output


def test_failed_job_is_not_requeued_and_its_status_is_shown(slurm, launcher):
    """One rank finds what the launcher cannot know, and is the first: srun then ends the other."""
    late = launcher.folder / "late"
    wait = '[ "$SLURM_PROCID" = 0 ] || sleep 5'
    late.write_text(f'#!/bin/sh\n{wait}\nexec "{sys.executable}" "$@"\n')
    late.chmod(0o755)
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    launcher.write_cluster("uneven", values | {"python": str(late)})
    rows = pq.read_table(TASK / "train.parquet").to_pylist()  # the command reads the first thousand
    rows[2000]["prompt"][0]["content"] += " 1 + 1" * 50
    pq.write_table(pa.Table.from_pylist(rows), launcher.folder / "late.parquet")
    settings = ("run.name=failing", f"data.train={launcher.folder}/late.parquet")
    output = launcher(
        "launch", "tiny.yaml", "--cluster", "uneven.yaml", "--wait", *settings, status=1
    )
    assert "row 2000: the prompt has" in output
    assert "FAILED" in launcher("status", "failing", status=1)
    assert launcher.exits("failing") == ["1"]


def test_dry_run_prints_submitted_script_and_leaves_no_files(slurm, launcher):
    arguments = (
        "tiny.yaml",
        "--cluster",
        "slurm.yaml",
        "run.name=shown",
        "--simulate-preemption=2",
    )
    before = slurm.ask("squeue -h -t all -o %i")
    output = launcher("launch", *arguments, "--dry-run")
    assert not launcher.run_folder("shown").exists()
    after = slurm.ask("squeue -h -t all -o %i")  # SLURM forgets ended jobs in the meantime
    assert set(after.split()) <= set(before.split())
    script = output.partition("batch script of job 1 of 1\n")[2].partition("=== script of each")[0]
    launcher("launch", *arguments)
    submitted = list(launcher.run_folder("shown").glob("launch/001/**/*_sbatch.sh"))
    assert [file.read_text().strip() for file in submitted] == [script.strip()]
    options = re.findall(r"(?m)^#SBATCH (--[\w-]+)", script)
    assert options and len(set(options)) == len(options)
    assert len(re.findall(r"(?m)^srun .*--wait\b", script)) == script.count("--wait") == 1
    launcher("cancel", "shown")


def test_settings_rejected_by_slurm_are_refused_before_submitting(slurm, launcher):
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    before = slurm.ask("squeue -h -t all -o %i")
    for change, reason in (
        ({"partition": "medium"}, "partition: this cluster has no medium; it has high, low"),
        ({"nodes": 4}, "SLURM would refuse this job: "),
        ({"container": {"image": "docker://x", "mounts": ["/:/"]}}, "has no --container-image"),
        ({"nodes": 1}, "nodes=1 x processes_per_node=1: 1 process does not fit tensor 1"),
    ):
        launcher.write_cluster("other", values | change)
        output = launcher("launch", "tiny.yaml", "--cluster", "other.yaml", "run.name=o", status=1)
        assert reason in output and output.count("error:") == 1, output
    assert not launcher.run_folder("o").exists()
    after = slurm.ask("squeue -h -t all -o %i")  # SLURM forgets ended jobs in the meantime
    assert set(after.split()) <= set(before.split())


def test_offline_dry_run_asks_no_cluster(launcher):
    shown = launcher("launch", "tiny.yaml", "--cluster", "slurm.yaml", "run.name=here",
                     "--dry-run", "--offline")  # fmt: skip
    assert "#SBATCH --partition=low\n" in shown and not launcher.run_folder("here").exists()
    assert "=== not checked (--offline)\nmodel.path: " in shown
