"""Joining torchrun and srun, the environment, and named seeds."""

import stat

import pytest

from megatron_rl.processes import ProcessPlace, join_processes, prepare_environment
from megatron_rl.seeds import derive_seed

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for name in (*PLACES, "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_nobody_started_us(environment):
    assert join_processes() is None
    # An sbatch script has a SLURM_PROCID too, but is no step of parallel tasks.
    environment.setenv("SLURM_PROCID", "0")
    assert join_processes() is None


def test_torchrun_started_us(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "8")
    assert join_processes() == ProcessPlace(3, 8, 0)


def test_srun_started_us(environment, tmp_path):
    scontrol = tmp_path / "scontrol"  # expands node lists; the real one asks a running cluster
    scontrol.write_text("#!/bin/sh\necho n1\necho n2\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    environment.setenv("PATH", str(tmp_path), prepend=":")
    steps = {"STEP_ID": "0", "PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8",
             "STEP_NODELIST": "n[1-2]", "JOB_ID": "20007"}  # fmt: skip
    for name, value in steps.items():
        environment.setenv(f"SLURM_{name}", value)
    assert join_processes() == ProcessPlace(5, 8, 1)
    import os

    # 8 tasks on 2 nodes; the port is 20000 + 20007 mod 20000, so that two jobs rarely share one.
    assert [os.environ[name] for name in PLACES] == ["5", "8", "1", "4", "n1", "20007"]


def test_what_the_user_set_is_kept(environment):
    import os

    environment.setenv("HF_HUB_OFFLINE", "0")
    environment.setenv("OMP_NUM_THREADS", "7")
    prepare_environment()
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["OMP_NUM_THREADS"]) == ("0", "7")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"  # nothing phones home unless asked for


def test_seeds_have_names():
    assert derive_seed(1, "rollout", 3) == derive_seed(1, "rollout", 3)
    different = {derive_seed(s, n, k) for s in (1, 2) for n in ("rollout", "eval") for k in (1, 2)}
    assert len(different) == 8
    assert all(0 <= seed < 2**31 for seed in different)
