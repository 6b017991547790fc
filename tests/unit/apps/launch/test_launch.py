"""A launch: refusals before anything is submitted, the packaged source, the shell script."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.apps.launch import nemo, slurm, starting
from megatron_rl.apps.launch.cluster import SlurmCluster, load_cluster
from megatron_rl.apps.launch.following import (
    Record,
    cancel,
    describe,
    final_status,
    find_record,
    has_record,
    is_active,
    read_exits,
    read_logs,
)
from megatron_rl.apps.launch.launch_plan import (
    Source,
    check_inputs,
    plan_launch,
    read_source,
    require_committed,
)
from megatron_rl.apps.launch.slurm import batch_lines, inside_script, rank_script
from megatron_rl.commands.launch import _follow
from megatron_rl.config import ConfigError, apply_override, parse_config

EXAMPLES = Path(__file__).parents[4] / "examples" / "pnpo"
SLURM = {
    "executor": "slurm", "partition": "batch", "time_limit": "04:00:00", "python": "/usr/bin/env",
    "nodes": 2, "processes_per_node": 4,
}  # fmt: skip


def write(folder, values, name="cluster.yaml"):
    file = folder / name
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return file


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config whose files are there, in the folder that the launch starts from."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    return write(
        tmp_path, {"model": {"path": "model"}, "data": {"train": "train.parquet"}}, "run.yaml"
    )


def plan(config, cluster, *overrides, **options):
    cluster = load_cluster(write(config.parent, cluster))
    return plan_launch(str(config), cluster, overrides=list(overrides), name="a", **options)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "clusters").glob("*.yaml")), ids=str)
def test_example_clusters_are_valid(file):
    load_cluster(file)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"partition": None}, "partition=null"),
        ({"partition": " "}, "partition: empty; name one"),
        ({"partitoin": "x"}, "partitoin: unknown key; did you mean partition?"),
        ({"executor": "ray"}, "executor='ray': must be local or slurm"),
        ({"time_limit": 14400}, "time_limit='14400': write it as hours, minutes and seconds, as"),
        ({"save_seconds": 14400}, "save_seconds=14400 leaves nothing of time_limit=04:00:00"),
        ({"nodes": 0}, "nodes=0: must be at least 1"),
        ({"environment": {"A B": "1"}}, "environment: 'A B' is no name of a variable"),
        ({"sbatch": {"cpus-per-task": 4}}, "sbatch.cpus_per_task: set by cpus_per_task itself"),
        (
            {"modules": ["cuda"]},
            "modules: unknown key; use setup: [module load NAME, ...] (cluster",
        ),
        ({"qos": "high"}, "qos: unknown key; use sbatch: {qos: ...}"),
        ({"setup": ["module load (x"]}, "setup: 'module load (x' is no complete command of bash"),
        ({"setup": "module load x"}, "setup='module load x': must be a list, such as [module load"),
        ({"container": {"image": "i", "runtime": "docker"}}, "'pyxis' or 'apptainer'"),
        ({"python": "$NOWHERE_SET/python"}, "the environment variable NOWHERE_SET is not set or"),
        ({"container": {"image": "i", "mounts": ["/data"]}}, "'/data' is not of the form"),
    ],
)
def test_wrong_cluster_files(tmp_path, change, output):
    with pytest.raises(ConfigError) as error:
        load_cluster(write(tmp_path, SLURM | change))
    assert output in str(error.value)


def test_missing_cluster_file_or_partition_is_refused(tmp_path):
    without = {key: value for key, value in SLURM.items() if key != "partition"}
    with pytest.raises(ConfigError, match="partition: missing"):
        load_cluster(write(tmp_path, without))
    with pytest.raises(ConfigError, match=r"cluster file .* does not exist"):
        load_cluster(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("overrides", "processes", "output"),
    [
        # a replica of 16 in 24 processes
        (["parallel.tensor=8", "parallel.context=2"], 24, "or start 16 processes"),
        (["parallel.data=4"], 8, "8 processes do not fit"),
        (["rollout.tensor=3"], 8, "rollout.tensor=3: vLLM's tensor"),
        (["parallel.tensor=2", "parallel.expert=16"], 8, "context * data = 8; choose"),
    ],
)
def test_processes_that_do_not_divide(overrides, processes, output):
    values = {"model": {"path": "m"}, "data": {"train": "t"}}
    for override in overrides:
        apply_override(values, override)
    assert any(output in problem for problem in parse_config(values).process_problems(processes))
    values["parallel"] = {"tensor": 2, "context": 2}
    values.pop("rollout", None)
    assert not parse_config(values).process_problems(processes)


@pytest.mark.parametrize(
    ("change", "overrides", "options", "output"),
    [
        ({}, ["model.path=nowhere"], {}, "nowhere does not exist; correct it"),
        ({}, ["objective.nam=gspo"], {}, "objective 'pnpo' has no option 'nam'; did you mean"),
        ({"python": "/nowhere/it"}, [], {}, "python: /nowhere/it does not exist; run tools"),
        ({"python": "/usr"}, [], {}, "python: /usr is no program; run tools/setup_env.sh, or set"),
        ({}, ["rollout.tensor=3"], {}, "nodes=2 x processes_per_node=4: rollout.tensor=3: vLLM"),
        ({"requeue": 0}, [], {"preempt_after": 2}, "nothing would continue the run"),
        ({}, ["trainer.steps=2"], {"preempt_after": 2}, "the run has 2 steps; choose fewer"),
        (
            {"container": {"image": "/nowhere.sqsh", "mounts": ["/nowhere:/data"]}}, [], {},
            "container.image: /nowhere.sqsh does not exist",
        ),
        (
            {"container": {"image": "nvcr.io#nvidia/pytorch:25.08-py3", "mounts": ["/usr:/usr"]}},
            [], {}, "is in none of container.mounts; mount its folder",
        ),
    ],
)  # fmt: skip
def test_launches_that_cannot_start(config, change, overrides, options, output):
    with pytest.raises(ConfigError) as error:
        plan(config, SLURM | change, *overrides, **options)
    assert output in str(error.value)
    assert not (config.parent / "runs").exists()


def test_launch_check_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import megatron_rl.apps.launch.starting"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_training_where_there_is_no_torch_is_refused_by_one_error(config):
    code = "import sys; sys.modules['torch'] = None; from megatron_rl.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = f"megatron-rl: error: {sys.prefix} has no torch: it is a launch-only environment"
    assert done.returncode == 1 and done.stderr.startswith(output) and done.stderr.count("\n") == 1


def test_local_executor_has_one_node_and_one_job(config):
    with pytest.raises(ConfigError) as error:
        plan(config, {"executor": "local", "python": "/usr/bin/env"}, nodes=2, chain=2)
    assert "nodes=2: the local executor has one" in str(error.value)
    assert "--chain 2: jobs are chained on SLURM" in str(error.value)


def test_paths_that_nemo_run_would_change_are_refused(config):
    for folder in ("with space", "nemo_run/runs"):
        with pytest.raises(ConfigError, match="NeMo-Run does not quote paths and rewrites"):
            plan(config, SLURM, f"run.dir={folder}")


def test_launch_is_complete_from_any_folder(config):
    launch = plan(config, SLURM, "run.name=mine", "eval.sets.x=train.parquet")
    here = config.parent
    assert launch.config.model.path == str(here / "model")
    assert launch.config.eval.sets["x"].path == str(here / "train.parquet")
    assert launch.config.run.resume == "auto"
    assert launch.folder == here / "runs" / "mine" / "launch" / "001"
    launch.folder.mkdir(parents=True)
    assert plan(config, SLURM, "run.name=mine").folder.name == "002"


def test_environment_values_reach_ranks_unchanged(config, tmp_path):
    odd = "two  words; $HOME 'quoted' \"twice\" `date` \\ *"
    printed = tmp_path / "printed"
    launch = plan(config, SLURM | {"environment": {"ODD": odd, "lower": "kept"}})
    (launch.folder / "source").mkdir(parents=True)
    # the script with `env` in the interpreter's place, and its arguments away
    script = rank_script(launch).replace(" -m megatron_rl.cli", f" -0 >{printed} #")
    subprocess.run(["bash", "-c", script], check=True)
    variables = dict(line.split("=", 1) for line in printed.read_text().split("\0") if line)
    assert (variables["ODD"], variables["lower"]) == (odd, "kept")
    assert variables["PYTHONPATH"].split(":")[0] == str(launch.folder / "source")


def run_rank(launch, tmp_path, **variables):
    """Run the script of a rank with the real bash; returns what it printed."""
    (launch.folder / "source").mkdir(parents=True, exist_ok=True)
    variables = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"} | variables
    return subprocess.run(
        ["bash", "-c", rank_script(launch)], env=variables, cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def program(folder, name, text):
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


SETUP = [
    'module() { export LOADED="$LOADED $2"; }  # as /etc/profile defines it',
    "module load cuda/12.8; module load 'two words'",
    "source here.sh",
    "export SAME=setup OTHER='a;b'",
    "cat >made <<END\n$SAME\nEND",
    "false || true",
]


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_setup_lines_run_in_order_before_the_program(config, tmp_path, executor):
    (tmp_path / "here.sh").write_text("export SOURCED=yes\n")
    program(tmp_path, "python", 'echo "$LOADED|$SOURCED|$SAME|$OTHER|${PYTHONPATH%%:*}|$PWD"')
    values = {"executor": "local"} if executor == "local" else SLURM
    more = {"setup": SETUP, "environment": {"SAME": "environment"}}
    launch = plan(config, values | more | {"python": str(tmp_path / "python")})
    done = run_rank(launch, tmp_path, PYTHONPATH="/other")
    source = launch.folder / "source"
    assert done.stdout == f" cuda/12.8 two words|yes|environment|a;b|{source}|{source}\n"
    assert (done.returncode, (tmp_path / "made").read_text()) == (0, "setup\n")


def test_setup_line_that_fails_ends_the_rank(config, tmp_path):
    program(tmp_path, "python", "echo started")
    values = SLURM | {"python": str(tmp_path / "python"), "setup": ["true", "(exit 3) # 'why'"]}
    launch = plan(config, values)
    done = run_rank(launch, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    message = "megatron-rl: error: setup: (exit 3) # 'why' failed with status 3\n"
    assert done.stderr == message
    assert (launch.folder / ".first-7-0").read_text() == "1\n"  # it is not queued again
    # A signal that comes before the program is there counts as an interruption.
    done = run_rank(plan(config, values | {"setup": ["kill -TERM $$"]}), tmp_path)
    assert (done.returncode, done.stdout) == (143, "")


APPTAINER = """
printf '%s\\n' "$@" >arguments
while [ "$1" != /images/a.sif ]; do shift; done
shift
exec "$@"
"""


@pytest.mark.parametrize(("gpus", "status"), [(8, 0), (None, 3)])
def test_apptainer_runs_setup_and_program_inside(config, tmp_path, gpus, status):
    """With a stand-in for apptainer: the command line that it gets, and what it runs."""
    program(tmp_path, "apptainer", APPTAINER)
    program(tmp_path, "python", f'echo "$IN|$ODD|$5"; exit {status}')
    container = {"image": "/images/a.sif", "mounts": ["/a b:/data"], "runtime": "apptainer",
                 "options": ["--no-home"]}  # fmt: skip
    values = {key: value for key, value in SLURM.items() if key != "python"}
    values |= {"container": container, "gpus_per_node": gpus, "setup": ["export IN=inside"],
               "environment": {"ODD": "$x 'y'"}}  # fmt: skip
    overrides = ["model.path=/data/m", "data.train=/data/t.parquet"]
    launch = plan(config, values, *overrides, offline=True)
    launch.folder.mkdir(parents=True)
    (launch.folder / "inside.sh").write_text(inside_script(launch))
    done = run_rank(launch, tmp_path)
    assert done.returncode == status
    assert done.stdout == f"inside|$x 'y'|{launch.folder}/config.yaml\n"
    run, folder = launch.run_folder, launch.folder
    devices = ["--nv"] if gpus else []
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "exec", *devices, "--bind", "/a b:/data", "--bind", f"{run}:{run}", "--no-home",
        "/images/a.sif", "bash", f"{folder}/inside.sh",
    ]  # fmt: skip
    assert (folder / ".first-7-0").exists() == bool(status)


def test_first_rank_that_fails_leaves_its_status(config, tmp_path):
    """And a signal to all processes of a rank is its command's affair."""
    (stub := tmp_path / "python").write_text('#!/bin/sh\nkill -TERM $PPID; exit "$STATUS"\n')
    stub.chmod(0o755)
    launch = plan(config, SLURM | {"python": str(stub)})
    (launch.folder / "source").mkdir(parents=True)
    for status in (0, 1, 75):
        variables = {"STATUS": str(status), "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", rank_script(launch)], env=variables, check=False)
        assert done.returncode == status
    assert (launch.folder / ".first-7-0").read_text() == "1\n"


BATCH = """
set -e
{before}
{lines}
exit_with() {{ return $1; }}
set +e
exit_with {status}
exitcode=$?
set -e
if [ $exitcode -ne 0 ]; then exit $exitcode; fi
"""


def run_batch(launch, before, *, status=0, requeue=3, link=1, further=""):
    """Run the batch lines in bash after `before`; return the exit code."""
    launch.folder.mkdir(parents=True, exist_ok=True)
    lines = batch_lines(launch, requeue=requeue, link=link) + further
    script = BATCH.format(before=before, lines=lines, status=status)
    return subprocess.run(["bash", "-c", script], check=False).returncode


@pytest.mark.parametrize(
    ("status", "first", "state", "restarts", "nodes", "requeued"),
    [
        (75, None, "RUNNING", 0, "answer", True),
        (143, None, "RUNNING", 0, "answer", True),  # SIGTERM before the ranks listened
        (75, None, "RUNNING", 3, "answer", False),  # as often as allowed
        (75, None, "CANCELLED", 0, "answer", False),  # a user cancelled it
        (75, None, "COMPLETING", 0, "answer", False),  # SLURM requeues it itself
        (1, None, "RUNNING", 0, "answer", False),
        (1, None, "RUNNING", 0, "lost", True),
        (1, None, "RUNNING", 3, "lost", False),
        (1, None, "CANCELLED", 0, "lost", False),
        (75, 1, "RUNNING", 0, "lost", True),
        (0, None, "RUNNING", 0, "answer", False),
        (75, 1, "RUNNING", 0, "answer", False),  # one rank refused the run before others began it
        (143, 75, "RUNNING", 0, "answer", True),
    ],
)
def test_requeue_depends_on_exit_status(
    config, tmp_path, status, first, state, restarts, nodes, requeued
):
    """The batch lines in bash, around stand-ins for the three commands that need a SLURM."""
    launch = plan(config, SLURM)
    launch.folder.mkdir(parents=True)
    output = tmp_path / "output"
    if first is not None:
        (launch.folder / f".first-7-{restarts}").write_text(f"{first}\n")
    (tmp_path / "srun").write_text(f"#!/bin/sh\n[ {nodes} = answer ]\n")
    (tmp_path / "srun").chmod(0o755)
    before = (
        f"squeue() {{ echo {state}; }}; scontrol() {{ echo $* >>{output}; }}\n"
        f"export SLURM_JOB_ID=7 SLURM_RESTART_COUNT={restarts} PATH={tmp_path}:$PATH"
    )
    assert run_batch(launch, before, status=status) == status
    assert (output.read_text() if output.exists() else "") == ("requeue 7\n" if requeued else "")
    (end,) = read_exits(str(launch.folder))
    assert (end.job, end.restarts, end.status) == ("7", restarts, first or status)


@pytest.mark.parametrize("status", [0, 137])
def test_hung_job_is_requeued_by_its_report(config, tmp_path, status):
    """Its watchdog has killed the ranks, and srun reports no more than that."""
    launch = plan(config, SLURM)
    stalls, output = launch.run_folder / "stalls", tmp_path / "output"
    stalls.mkdir(parents=True)
    for file, when in (("old", "-d yesterday"), ("new", "-d '1 second'")):
        before = (
            f"squeue() {{ echo RUNNING; }}; scontrol() {{ echo $* >>{output}; }}\n"
            "timeout() { true; }; export SLURM_JOB_ID=7"
        )
        touch = f"\ntouch {when} {stalls}/{file}"
        assert run_batch(launch, before, status=status, further=touch) == status
        is_again = file == "new" and status
        assert (output.read_text() if output.exists() else "") == (
            "requeue 7\n" if is_again else ""
        )
        assert read_exits(str(launch.folder))[-1].status == (75 if is_again else status)


def test_batch_script_ended_by_slurm_is_not_done(config):
    launch = plan(config, SLURM)
    before = "squeue() { echo COMPLETING; }; scontrol() { exit 9; }; export SLURM_JOB_ID=7"
    # the signal comes while srun runs, whose status the script never reads
    assert run_batch(launch, before, further="\nkill -TERM $$") == 143
    (end,) = read_exits(str(launch.folder))
    assert end.status == 143


@pytest.mark.parametrize(("earlier", "runs"), [("75", True), ("0", False), ("1", False)])
def test_chained_job_runs_only_if_previous_job_left_work(config, earlier, runs):
    launch = plan(config, SLURM | {"requeue": 0}, chain=2)
    launch.folder.mkdir(parents=True)
    (launch.folder / "exits").write_text(f"6 0 {earlier}\n")
    before = "squeue() { echo RUNNING; }; export SLURM_JOB_ID=7"
    assert run_batch(launch, before, requeue=0, link=2) == (0 if runs else int(earlier))
    assert [each.job for each in read_exits(str(launch.folder))] == ["6", "7"][: 1 + runs]


def test_source_is_packaged_with_uncommitted_changes(tmp_path):
    (tmp_path / "my_rewards.py").write_text("def score(): ...\n")
    (tmp_path / "my_lags").mkdir()
    (tmp_path / "my_lags" / "__init__.py").write_text("class Mine: ...\n")
    source = read_source(["my_rewards:score", "my_lags:Mine"], tmp_path)
    assert source.files["my_rewards.py"] == tmp_path / "my_rewards.py"
    source.copy_to(tmp_path / "copy")
    for name in ("megatron_rl/apps/launch/launch_plan.py", "my_rewards.py", "my_lags/__init__.py"):
        assert (tmp_path / "copy" / name).read_bytes() == source.files[name].read_bytes()
    digest = source.digest
    (tmp_path / "my_rewards.py").write_text("def score(): pass\n")
    assert read_source(["my_rewards:score", "my_lags:Mine"], tmp_path).digest != digest
    (tmp_path / "my_rewards.py").write_text("def score(): ...\n")
    assert read_source(["my_rewards:score", "my_lags:Mine"], tmp_path).digest == digest


def test_require_committed_lists_uncommitted_files():
    diff = "diff --git a/megatron_rl/runtime/seeds.py b/megatron_rl/runtime/seeds.py\n+x\n"
    with pytest.raises(ConfigError, match=r"to package them:\n  megatron_rl/runtime/seeds.py$"):
        require_committed(Source({}, "abc", diff))
    with pytest.raises(ConfigError, match="is not in a git checkout"):
        require_committed(Source({}, None, ""))
    require_committed(Source({}, "abc", ""))


def test_offline_dry_run_needs_no_slurm_and_no_cluster_file(config, monkeypatch, tmp_path):
    """On a laptop: the run's folder cannot be made here, and nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(starting, "require_nemo_run", lambda: None)
    monkeypatch.setattr(starting, "materialize", lambda launch: [f"sbatch {launch.folder}/x"])
    overrides = ["run.dir=/proc/shared/runs", "model.path=/shared/model", "data.epochs=2"]
    launch = plan(config, SLURM | {"python": "/shared/python"}, *overrides, offline=True)
    shown = starting.preview(launch, offline=True)
    assert "sbatch /proc/shared/runs/a/launch/001/x\n" in shown
    _, _, listed = shown.partition("=== not checked (--offline)\n")
    assert listed.splitlines()[:5] == [
        "model.path: /shared/model", f"data.train: {tmp_path}/train.parquet",
        "data.epochs: 2, whose number of steps the start of the run computes",
        "python: /shared/python", "partition: batch",
    ]  # fmt: skip
    mounted = {"container": {"image": "/shared/x.sqsh", "mounts": ["/a:/data"]}}
    with pytest.raises(ConfigError) as error:  # what needs no file is still checked
        plan(config, SLURM | mounted, *overrides, offline=True)
    assert "model.path: /shared/model is in none of container.mounts" in str(error.value)
    assert "x.sqsh" not in str(error.value)


def test_slurm_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SLURM cannot be reached \(scontrol ping: scontrol is"):
        slurm.check_cluster(SlurmCluster.model_validate(SLURM))


@pytest.fixture
def local(config, monkeypatch, tmp_path):
    """A launch on this machine, checked; its record is kept below the test's folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return plan(config, {"executor": "local", "python": "/usr/bin/env"})


def test_missing_nemo_run_writes_nothing(local, monkeypatch):
    monkeypatch.setattr(nemo, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="NeMo-Run is not installed in this environment"):
        starting.start_here(local)
    assert not local.run_folder.exists() and not has_record(local.name)


def test_launcher_failure_keeps_run_and_prints_cause(local, monkeypatch):
    """The process that follows the run has an error after hours: the run's folder is not its."""
    checkpoint = local.run_folder / "checkpoints" / "step_000001" / "trainer.json"

    def fail(launch):
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        raise SystemExit(0)

    monkeypatch.setattr(starting, "require_nemo_run", lambda: None)
    monkeypatch.setattr(starting, "_run_until_finished", fail)
    record = starting.start_here(local)
    os.waitpid(record.process, 0)
    assert checkpoint.exists()
    messages, status = describe(record)
    assert status == 1 and f"{local.name}: FAILED" in messages
    assert "  error: the launcher failed: SystemExit" in messages
    assert "the launcher failed" in "".join(read_logs(record, follow=False))
    assert _follow(record) == 1  # as `--wait` does


def test_status_covers_runs_started_by_train(monkeypatch, tmp_path, config):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.read_text() + "trainer: {steps: 2}\n")
    (run / "log.txt").write_text("hello\n")
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n')
    hold = (
        "import os, sys; from megatron_rl.runs.files import try_lock; "
        "f = open(sys.argv[1], 'a+'); "
        f"try_lock(f); print('process', os.getpid(), 'on', {socket.gethostname()!r}, file=f, "
        "flush=True); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(run / ".lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline()
    record = find_record("mine")  # as `megatron-rl status mine`, in the folder of the command
    messages, status = describe(record)
    assert status == 0 and "mine: RUNNING (process " in messages and "step 1 of 2" in messages
    cancel(record)
    assert process.wait() == -signal.SIGTERM
    messages, status = describe(find_record(str(run)))
    assert status == 75 and ": STOPPED" in messages
    assert f"continue with: megatron-rl train --config {run}/config.yaml" in messages
    assert "hello" in "".join(read_logs(record, follow=True))
    (run / "model").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    assert describe(record)[1] == 0 and "mine: COMPLETED" in describe(record)[0]


def test_launches_are_found_by_name_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record = Record("a", run="/r/a", folder=str(tmp_path), steps=3, jobs=[], process=1, host="h")
    record.save()
    assert find_record("a") == record
    with pytest.raises(ConfigError, match="nothing was launched as 'b'; known here: a"):
        find_record("b")
    assert final_status(record) == 1  # it ended without a word
    (tmp_path / "exits").write_text("local 0 75\nlocal 0 0\n")
    assert final_status(record) == 0


@pytest.mark.parametrize(
    ("state", "exits", "status"),
    [
        ("COMPLETED", "9 0 75\n9 1 0\n", 0),
        ("FAILED", "9 0 3\n", 3),
        ("CANCELLED", "9 0 143\n", 1),
        ("NODE_FAIL", "", 1),
        ("TIMEOUT", "9 0 75\n", 1),
        ("UNKNOWN", "9 0 0\n", 0),  # SLURM has forgotten it: its batch script's word counts
        ("UNKNOWN", "", 1),
    ],
)
def test_status_matches_processes(monkeypatch, tmp_path, state, exits, status):
    monkeypatch.setattr(slurm, "job_state", lambda job: slurm.JobState(job, state))
    (tmp_path / "exits").write_text(exits)
    record = Record("a", run="/r/a", folder=str(tmp_path), steps=3, jobs=["9"])
    assert final_status(record) == status


def test_launch_with_uncollected_process_has_ended(tmp_path):
    """As an orphan in a container whose first process collects nobody."""
    process = subprocess.Popen(["sleep", "600"])
    record = Record("a", str(tmp_path), str(tmp_path), 1, [], process.pid, socket.gethostname())
    assert is_active(record)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays as it is
    assert not is_active(record)
    process.wait()
    assert not is_active(record)


def test_interpreter_that_cannot_check_is_warning(config):
    warning = check_inputs(plan(config, {"executor": "local", "python": "/usr/bin/env"}))
    assert warning.startswith("prompts, reward and weights were not checked: /usr/bin/env failed: ")


def test_run_on_other_machines_ignores_local_devices(config):
    """Transformer Engine needs CUDA, which a login node may lack."""
    launch = plan(
        config, SLURM | {"python": sys.executable}, "model.transformer_engine=true",
        "parallel.data=8", "rollout.prompts_per_step=8", "trainer.minibatches=1",
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        check_inputs(launch)
    output = str(error.value)
    assert output.startswith("this launch cannot start:\n") and "transformer_engine" not in output
    assert "model.path: " in output


def test_options_of_a_batch_script_are_given_once():
    script = (
        "#!/bin/bash\n#SBATCH --gpus-per-node=8\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n\n"
        "srun --output o --wait=60 --kill-on-bad-exit=1 --wait=0 bash rank.sh\n"
    )
    assert nemo.without_repeats(script) == (
        "#!/bin/bash\n#SBATCH --gpus-per-node=8\n#SBATCH --nodes=2\n\n"
        "srun --output o --kill-on-bad-exit=1 --wait=0 bash rank.sh\n"
    )
