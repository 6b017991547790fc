"""Joining torchrun and srun, and environments that only look like theirs."""

import os

import pytest

from megatron_rl.commands.train import check_place
from megatron_rl.config import ConfigError, parse_config
from megatron_rl.errors import UserError
from megatron_rl.runtime import joining
from megatron_rl.runtime.joining import (
    ProcessPlace,
    cores_before_joining,
    join_processes,
    share_of_cores,
)
from megatron_rl.runtime.processes import LAUNCHER, prepare_environment

MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for name in (*PLACES, "SLURM_STEP_ID", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_launcher_there_is_one_rank(environment):
    assert join_processes() is None
    # An sbatch script has a SLURM_PROCID too, but is no step of parallel tasks.
    environment.setenv("SLURM_PROCID", "0")
    assert join_processes() is None


def test_torchrun_started_us(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "8")
    environment.setenv("MASTER_ADDR", "n1")
    environment.setenv("MASTER_PORT", "29500")
    assert join_processes() == ProcessPlace(3, 8, 0)


def test_srun_started_us(environment):
    """Without `scontrol`, which containers lack."""
    environment.setenv("PATH", "")
    steps = {"STEP_ID": "0", "PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8",
             "STEP_NUM_NODES": "2", "STEP_NODELIST": "n[1-2]", "JOB_ID": "20007"}  # fmt: skip
    for name, value in steps.items():
        environment.setenv(f"SLURM_{name}", value)
    assert join_processes() == ProcessPlace(5, 8, 1)
    # 8 tasks on 2 nodes; the port is 20000 + 20007 mod 20000, so that two jobs rarely share one.
    assert [os.environ[name] for name in PLACES] == ["5", "8", "1", "4", "n1", "20007"]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"), ("n1,m2", "n1"), ("gpu[007-012,020],x1", "gpu007"), ("gpu[3,5]", "gpu3"),
        ("a[01-02]b[3-4].site", "a01b3.site"), ("node-a,node-b", "node-a"),
    ],
)  # fmt: skip
def test_first_host_of_slurms_list(nodes, host):
    assert joining.first_host(nodes) == host


CURE = "unset RANK WORLD_SIZE"
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TASK = STEP | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "5", "SLURM_PROCID": "1",
               "SLURM_LOCALID": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, ("RANK='0', but no WORLD_SIZE", CURE)),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE='2', but no RANK", CURE)),
        ({"RANK": "0", "WORLD_SIZE": "2"},
         ("RANK='0' and WORLD_SIZE='2', but no MASTER_ADDR", CURE)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1", "MASTER_PORT": ""},
         ("but no MASTER_PORT", CURE)),
        ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING,
         ("RANK='2'", "from 0 and below WORLD_SIZE=2", CURE)),
        ({"RANK": "worker-0", "WORLD_SIZE": "2"} | MEETING, ("RANK='worker-0'", CURE)),
        ({"RANK": "0", "WORLD_SIZE": "0"} | MEETING,
         ("WORLD_SIZE='0': it must be a whole number from 1", CURE)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "http"},
         ("MASTER_PORT='http'", "from 1 and below 65536", CURE)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"} | MEETING, ("LOCAL_RANK='x'", CURE)),
        (STEP, ("no SLURM_STEP_NODELIST, SLURM_JOB_ID", "start by srun, or unset SLURM_STEP_ID")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2(x3)"},
         ("SLURM_STEP_NUM_TASKS='2(x3)'", "unset SLURM_STEP_ID")),
        (TASK | {"SLURM_PROCID": "2"},
         ("SLURM_PROCID='2'", "below SLURM_STEP_NUM_TASKS=2", "unset SLURM_STEP_ID")),
    ],
)  # fmt: skip
def test_impossible_variables_are_named_with_cure(environment, variables, message):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(UserError) as error:
        join_processes()
    assert [part for part in message if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "", "WORLD_SIZE": ""},
        {"LOCAL_RANK": "3"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},  # salloc
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"SLURM_STEP_ID": ""},
        STEP | {"SLURM_PTY_PORT": "4242"},  # a shell of `srun --ntasks 2 --pty bash`
    ],
)
def test_process_of_its_own_in_an_environment_with_leftovers(environment, variables):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert join_processes() is None


def test_ranks_by_variables_alone_are_announced(environment, capsys):
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | MEETING).items():
        environment.setenv(name, value)
    join_processes()
    assert capsys.readouterr().err == (
        "megatron-rl: rank 1 of 2, by RANK and WORLD_SIZE of the environment (to start all "
        f"processes of this node instead, run: {CURE})\n"
    )
    environment.setenv("TORCHELASTIC_RUN_ID", "none")  # of torchrun
    join_processes()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("cores", "ranks", "cuda", "threads"),
    [(2, 1, False, "2"), (2, 2, False, "1"), (7, 3, False, "2"), (2, 4, False, "1"),
     (64, 8, True, "1")],
)  # fmt: skip
def test_ranks_share_cores_of_node(environment, cores, ranks, cuda, threads):
    environment.delenv("OMP_NUM_THREADS", raising=False)
    environment.delenv("SLURM_CPUS_PER_TASK", raising=False)
    environment.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    environment.setattr(joining, "has_cuda", lambda: cuda)
    places = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": str(ranks)}
    for name, value in (places | MEETING).items():
        environment.setenv(name, value)
    prepare_environment()  # the launcher's, which is inherited, decides nothing
    join_processes()
    assert os.environ["OMP_NUM_THREADS"] == threads
    environment.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    join_processes()  # what is set is kept
    assert os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("value", "threads"), [("", 3), ("all", 3), ("0", 3), ("2,4", 2)])
def test_left_over_number_of_threads(environment, value, threads, capsys):
    environment.setenv("OMP_NUM_THREADS", value)  # a list is one number for each nested level
    environment.setattr(joining, "has_cuda", lambda: False)
    environment.setattr(joining, "cores_before_joining", lambda ranks: 3)
    found = []
    environment.setattr("torch.get_num_threads", lambda: 0)
    environment.setattr("torch.set_num_threads", found.append)
    joining.share_cores(1)
    named = capsys.readouterr().err
    assert (f"OMP_NUM_THREADS={value} is no number of threads; 3 are used" in named) == (
        value in ("all", "0")
    )
    assert found == [threads]


@pytest.mark.parametrize(
    ("own", "all_ranks", "share"),
    [
        # 8 ranks bound to 12 cores each have 12, not 12 / 8
        (range(12), [range(12 * rank, 12 * rank + 12) for rank in range(8)], 12),
        (range(96), [range(96)] * 8, 12),  # not bound: the same 96 for all
        (range(16), [range(16)] * 3, 5),  # 16 / 3
        (range(2), [range(2)] * 4, 1),  # never none
        (range(6), [range(6)], 6),
        # two sockets of 24 cores, four ranks bound to each: 24 / 4
        (range(24), [range(24)] * 4 + [range(24, 48)] * 4, 6),
        # bound to 0..7, and another rank may use all of 0..15: 8 halves
        (range(8), [range(8), range(16)], 4),
        (range(16), [range(8), range(16)], 12),  # 8 halves and 8 of its own
    ],
)
def test_core_is_divided_among_ranks_that_may_use_it(own, all_ranks, share):
    assert share_of_cores(frozenset(own), all_ranks) == share


@pytest.mark.parametrize(
    ("cores", "ranks", "slurm", "share"),
    [
        (range(12), 8, {}, 1),  # possibly shared: 12 / 8
        (range(96), 8, {}, 12),
        (range(12), 8, {"CPUS_PER_TASK": "12"}, 12),
        (range(96), 8, {"CPUS_PER_TASK": "12"}, 12),  # requested and not bound
        (range(12, 24), 2, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF000"}, 12),
        (range(12), 2, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF"}, 6),
        # a list of another number of tasks, or of none, is not used
        (range(12), 3, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFFF,0xFFF000"}, 4),
        (range(12), 3, {"CPU_BIND_TYPE": "none", "CPU_BIND_LIST": "0xF,0xF0,0xF00"}, 4),
        (range(12), 3, {"CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "?"}, 4),
    ],
)  # fmt: skip
def test_cores_under_slurm_before_ranks_can_ask_each_other(monkeypatch, cores, ranks, slurm, share):
    for name in ("CPUS_PER_TASK", "CPU_BIND_TYPE", "CPU_BIND_LIST"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    assert cores_before_joining(ranks) == share


def test_missing_network_interface_is_named(environment):
    """A profile of a cluster on a machine without its network."""
    environment.setattr(joining, "has_cuda", lambda: True)
    for variable, value, is_here in (
        ("GLOO_SOCKET_IFNAME", "lo", True), ("GLOO_SOCKET_IFNAME", "ib7", False),
        ("GLOO_SOCKET_IFNAME", "l", False), ("NCCL_SOCKET_IFNAME", "ib7,l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False), ("NCCL_SOCKET_IFNAME", "^ib7", True),
        ("NCCL_SOCKET_IFNAME", "", True),
    ):  # fmt: skip
        environment.setenv(variable, value)
        if is_here:
            assert join_processes() is None
        else:
            with pytest.raises(
                UserError, match=f"{variable}=.*: this machine has.*lo.*unset {variable}"
            ):
                join_processes()
        environment.delenv(variable)


def test_left_over_number_of_ranks_is_named(environment):
    config = parse_config(
        {"model": {"path": "m"}, "data": {"train": "t"}, "parallel": {"tensor": 2}}
    )
    environment.delenv(LAUNCHER, raising=False)
    with pytest.raises(
        ConfigError, match=r"start 2 processes; .*WORLD_SIZE=3 .*RANK=1: .*unset RANK"
    ):
        check_place(config, ProcessPlace(1, 3, 0))
    check_place(config, ProcessPlace(1, 2, 0))
    environment.setenv("TORCHELASTIC_RUN_ID", "a")
    check_place(config, ProcessPlace(1, 3, 0))
