"""A tiny training on a real SLURM, launched by NeMo-Run: over two nodes, through everything that
may happen to it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.runs.rows import read_metrics
from tests.functional.debian import missing
from tests.functional.slurm.throwaway import PACKAGES, PROGRAMS, ThrowawaySlurm
from tests.functional.tiny_runs import ROOT, TASK, make_task

LAUNCHER = ROOT / ".cache" / "launcher"
STEPS = 60  # so many that a paced run cannot end by itself
DEADLINE = 240.0


class Launcher:
    """`megatron-rl` as a user has it on a login node, in the launcher's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"),
        }  # fmt: skip
        (folder / "tiny.yaml").write_text(json.dumps({
            "model": {"path": str(TASK / "model")},
            "data": {"train": str(TASK / "train.parquet"), "max_prompt_tokens": 48},
            "parallel": {"context": 2},
            "rollout": {"prompts": 4, "responses_per_prompt": 2, "max_response_tokens": 40,
                        "kv_cache_mib": 16, "max_sequences": 8},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
            "trainer": {"steps": STEPS, "epochs": 1, "minibatches": 1, "checkpoint_every": 1000,
                        "tokens_per_micro_batch": 1024},
            "reward": {"verifier": "paced:score", "time_limit_seconds": 60},
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
            "save_seconds": 90,
        }  # fmt: skip
        self.write_cluster("slurm", {"executor": "slurm", **cluster, **slurm})
        self.write_cluster("local", {"executor": "local", **cluster})

    def write_cluster(self, name: str, values: dict) -> None:
        (self.folder / f"{name}.yaml").write_text(json.dumps(values))

    def __call__(self, *arguments: str, status: int = 0, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [str(LAUNCHER / "bin" / "python"), "-m", "megatron_rl.cli", *arguments],
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

    def start(self, name: str, *more: str, cluster: str = "slurm") -> str:
        """Launch; returns the id of its job."""
        self("launch", "tiny.yaml", "--cluster", f"{cluster}.yaml", f"run.name={name}", *more)
        jobs = json.loads(next(self.folder.glob(f"state/**/{name}.json")).read_text())["jobs"]
        return jobs[0] if jobs else ""

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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := missing(PROGRAMS, packages=PACKAGES):
        pytest.skip(f"no SLURM here: {reason}")
    with ThrowawaySlurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


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


def test_a_run_survives_what_happens_to_it(slurm, launcher):
    """Preempted, out of time, its node lost: in the end the weights of an undisturbed run."""
    run = launcher.run_folder("disturbed")
    run.mkdir(parents=True)
    (run / "pace").touch()
    job = launcher.start("disturbed")
    state = lambda: slurm.ask(f"squeue -h -t all -j {job} -o %T")  # noqa: E731
    launcher.wait_until("at step 2", lambda: steps_of(run) >= 2, "disturbed")
    assert "disturbed is active as job" in launcher(
        "launch", "tiny.yaml", "--cluster", "slurm.yaml", "run.name=disturbed", "run.resume=auto",
        status=1,
    )  # fmt: skip

    # A job of the other partition takes both nodes.
    slurm.ask(f"sbatch -p high -N 2 --exclusive -o {run}/high.out --wrap hostname")
    launcher.wait_until("preempted", lambda: launcher.exits("disturbed") == ["75"], "disturbed")
    recorded = steps_of(run)
    # Asked after a step, or in the middle of the next one, which is saved before it is recorded.
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name in {f"step_{recorded:06d}", f"step_{recorded + 1:06d}"}
    launcher.wait_until("going on", lambda: steps_of(run) > recorded, "disturbed")

    # Its time limit comes near, while an undisturbed run has the nodes' other cores. SLURM looks at
    # limits every 30 s: with one or two minutes left it signals the next time.
    minutes = int(slurm.ask(f"squeue -h -j {job} -o %M").split(":")[0])
    slurm.ask(f"scontrol update jobid={job} timelimit={minutes + 2}")
    launcher.start("whole")
    launcher.wait_until(
        "out of time", lambda: launcher.exits("disturbed") == ["75"] * 2, "disturbed"
    )
    slurm.ask(f"scontrol update jobid={job} timelimit=30")

    # A node is lost: what was not saved is done again.
    launcher("logs", "-f", "whole")
    launcher.wait_until("started again", lambda: state() == "RUNNING", "disturbed")
    slurm.kill_node("n2")
    (run / "pace").unlink()
    launcher.wait_until("without its node", lambda: state() == "PENDING", "disturbed")
    slurm.start_node("n2")

    assert "job" in launcher("logs", "-f", "disturbed", cwd=Path("/"))
    assert "COMPLETED" in launcher("status", "disturbed", cwd=Path("/"))
    assert steps_of(run) == steps_of(launcher.run_folder("whole")) == STEPS
    assert launcher.exits("whole") == ["0"]
    one, other = launcher.weights("disturbed"), launcher.weights("whole")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert "ODD=two words" in (run / "launch" / "001" / "rank.sh").read_text().replace("'", "")


def test_a_chain_goes_on_where_a_rehearsed_preemption_ended(slurm, launcher):
    """The first of two jobs is asked to end after two steps, and none is queued again."""
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    launcher.write_cluster("once", values | {"requeue": 0})
    launcher.start("chained", "--chain", "2", "--rehearse-preemption", "2", cluster="once")
    launcher.wait_until("at its end", lambda: len(launcher.exits("chained")) == 2, "chained")
    assert launcher.exits("chained") == ["75", "0"]
    assert steps_of(launcher.run_folder("chained")) == STEPS
    whole = launcher.weights("whole")
    assert all(tensor.equal(whole[name]) for name, tensor in launcher.weights("chained").items())


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_RL_ALL_FAULTS"), reason="MEGATRON_RL_ALL_FAULTS=1 runs it: minutes"
)
def test_a_job_that_hangs_is_queued_again_and_ends_as_the_undisturbed_one(slurm, launcher):
    """One of two nodes' ranks is stopped: the watchers end both, and nobody starts it by hand."""
    settings = ("trainer.stall_seconds=45", "trainer.checkpoint_every=2", "trainer.steps=8")
    run = launcher.run_folder("hung")
    run.mkdir(parents=True)
    (run / "pace").touch()
    launcher.start("hung", *settings)
    launcher.wait_until("at step 3", lambda: steps_of(run) >= 3, "hung")
    rank = min(slurm.processes("n2", of="megatron_rl.cli\0train"))  # not one that it has forked
    os.kill(rank, signal.SIGSTOP)
    (run / "pace").unlink()
    launcher.wait_until("ended by its watchers", lambda: launcher.exits("hung") == ["75"], "hung")
    reports = [file.read_text().splitlines()[0] for file in (run / "stalls").iterdir()]
    assert any("rank 1 is stopped" in report for report in reports), reports
    launcher.start("unhung", *settings)
    for name in ("hung", "unhung"):
        assert "job" in launcher("logs", "-f", name)
    assert launcher.exits("hung") == ["75", "0"] and launcher.exits("unhung") == ["0"]
    one, other = launcher.weights("hung"), launcher.weights("unhung")
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())
    print(*reports, launcher("logs", "hung"), sep="\n")


def test_a_cancelled_job_is_not_queued_again(slurm, launcher):
    job = launcher.start("cancelled", "--chain", "2")
    state = lambda: slurm.ask(f"squeue -h -t all -j {job} -o %T")  # noqa: E731
    launcher.wait_until("running", lambda: state() == "RUNNING", "cancelled")
    launcher("cancel", "cancelled")
    launcher.wait_until("cancelled", lambda: state() == "CANCELLED", "cancelled")
    said = launcher("status", "cancelled", status=1)
    assert said.count("CANCELLED") == 2, said
    launcher.wait_until("gone", lambda: not slurm.ask("squeue -h"), "cancelled")


def test_a_failing_job_is_not_queued_again_and_its_status_is_told(slurm, launcher):
    """The ranks find what the launcher cannot know: prompts longer than allowed."""
    settings = ("run.name=failing", "data.max_prompt_tokens=1")
    said = launcher("launch", "tiny.yaml", "--cluster", "slurm.yaml", "--wait", *settings, status=1)
    assert "more than data.max_prompt_tokens=1" in said
    assert "FAILED" in launcher("status", "failing", status=1)
    assert launcher.exits("failing") == ["1"]


def test_a_dry_run_shows_the_script_that_is_submitted_and_leaves_nothing(slurm, launcher):
    arguments = (
        "tiny.yaml",
        "--cluster",
        "slurm.yaml",
        "run.name=shown",
        "--rehearse-preemption=2",
    )
    before = slurm.ask("squeue -h -t all -o %i")
    said = launcher("launch", *arguments, "--dry-run")
    assert not launcher.run_folder("shown").exists()
    after = slurm.ask("squeue -h -t all -o %i")  # SLURM forgets ended jobs in the meantime
    assert set(after.split()) <= set(before.split())
    script = said.partition("batch script of job 1 of 1\n")[2].partition("=== script of each")[0]
    launcher("launch", *arguments)
    submitted = list(launcher.run_folder("shown").glob("launch/001/**/*_sbatch.sh"))
    assert [file.read_text().strip() for file in submitted] == [script.strip()]
    launcher("cancel", "shown")


def test_what_slurm_would_refuse_is_refused_before(slurm, launcher):
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    before = slurm.ask("squeue -h -t all -o %i")
    for change, reason in (
        ({"partition": "medium"}, "partition: this cluster has no medium; it has high, low"),
        ({"nodes": 4}, "SLURM would refuse this job: "),
        ({"container": {"image": "docker://x", "mounts": ["/:/"]}}, "has no --container-image"),
        ({"nodes": 1}, "nodes=1 x processes_per_node=1: 1 process cannot hold tensor 1"),
    ):
        launcher.write_cluster("other", values | change)
        said = launcher("launch", "tiny.yaml", "--cluster", "other.yaml", "run.name=o", status=1)
        assert reason in said and said.count("error:") == 1, said
    assert not launcher.run_folder("o").exists()
    after = slurm.ask("squeue -h -t all -o %i")  # SLURM forgets ended jobs in the meantime
    assert set(after.split()) <= set(before.split())


def test_the_runs_of_a_study_are_jobs(slurm, launcher):
    """Side by side, each on one node; the login node tables them, and starts none again."""
    base = json.loads((launcher.folder / "tiny.yaml").read_text())
    base["parallel"], base["trainer"]["steps"] = {}, 2
    del base["run"]
    objectives = {name: {"objective": {"name": name}} for name in ("pnpo", "gspo")}
    (launcher.folder / "study.yaml").write_text(json.dumps({
        "name": "jobs", "base": base, "axes": {"objective": objectives}, "seeds": [1],
        "side_by_side": 2,
    }))  # fmt: skip
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    launcher.write_cluster("one_node", values | {"nodes": 1})
    for _ in range(2):
        said = launcher("study", "study.yaml", "--cluster", "one_node.yaml")
        assert "jobs: 2 of 2 done" in said and "failed" not in said, said
    for name in objectives:
        run = launcher.run_folder(f"jobs/runs/{name}-seed1")
        assert steps_of(run) == 2 and (run / "launch" / "001" / "exits").exists()
        assert not (run / "launch" / "002").exists()
    assert (launcher.run_folder("jobs") / "results.parquet").exists()


def test_on_one_machine_a_rehearsed_preemption_changes_nothing(launcher):
    """NeMo-Run's local executor; the weights are compared with those of two nodes."""
    launcher.start("here", "--rehearse-preemption", "2", cluster="local")
    launcher("logs", "-f", "here")
    assert "COMPLETED" in launcher("status", "here")
    assert launcher.exits("here") == ["75", "0"]
    whole = launcher.weights("whole")
    assert all(tensor.equal(whole[name]) for name, tensor in launcher.weights("here").items())
