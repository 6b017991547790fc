"""Process groups: on CUDA one group of all ranks has sockets, counted by Megatron's own code."""

import ast
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.actor import groups
from megatron_rl.errors import UserError
from megatron_rl.runtime.launcher import _find_port
from tests import ranks
from tests.ranks import run_ranks
from tools.benchmarks.group_sockets import count, create_groups, measure

RANKS = 64
MEGATRONS_GROUPS = 20  # that a rank is in
LAYOUTS = (
    {"pipeline": 2, "context": 4, "expert": 8},
    {"tensor": 4, "pipeline": 2, "expert": 8},
)


def _count_all(results):
    for layout in LAYOUTS:
        for on_cuda in (False, True):
            groups = create_groups(0, RANKS, layout, on_cuda=on_cuda)
            results.put(([members for members, _ in groups], count(groups)))


@pytest.fixture(scope="module")
def counted():
    """Members of the groups of rank 0 and its sockets, on CPU and CUDA, by layout."""
    results = ranks.make_queue()
    process = ranks.start_process(_count_all, results)
    try:
        return [[results.get(timeout=300) for _ in range(2)] for _ in LAYOUTS]
    finally:
        process.kill()


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_sockets_are_those_of_one_group_on_cuda_and_of_different_ones_on_cpu(counted, index):
    (on_cpu, cpu_sockets), (on_cuda, cuda_sockets) = counted[index]
    assert set(on_cpu) == set(on_cuda) and len(on_cuda) == 1 + MEGATRONS_GROUPS
    megatrons = on_cpu[1:]
    assert len(set(megatrons)) == len(megatrons)  # no two of the same ranks in the same order
    assert cuda_sockets == RANKS - 1 < cpu_sockets


def test_megatrons_groups_are_of_nccl_where_there_is_cuda(monkeypatch):
    """The group of all ranks has gloo too; another default would connect every group's ranks."""
    from megatron_rl.actor import groups

    monkeypatch.setattr(groups.device, "has_cuda", lambda: True)
    assert groups.device_backend() == "nccl"
    monkeypatch.setattr(groups.device, "has_cuda", lambda: False)
    assert groups.device_backend() is None


def _groups_without_sockets(rank, world_size):
    layout = {"tensor": 2, "context": 2}
    return measure(rank, world_size, layout, True, None), dist.get_world_size()


def test_objects_are_gathered_over_small_group():
    """8 ranks in a layout with 17 groups; the group for objects has two neighbors and itself."""
    assert max(added for added, _ in run_ranks(_groups_without_sockets, 8)) < 16


OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list")


def test_objects_travel_only_over_groups_with_gloo():
    """On CUDA the others would copy objects to the device, or have no backend for host tensors."""
    package = Path(__file__).parents[3] / "megatron_rl"
    found = 0
    for file in package.rglob("*.py"):
        text = file.read_text()
        if not any(name in text for name in OF_OBJECTS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in OF_OBJECTS:
                groups = [ast.unparse(one.value) for one in node.keywords if one.arg == "group"]
                allowed = [[], ["topology.host_group"]]
                if file.parent.name == "engine":  # vLLM's group of an engine's ranks on the host
                    allowed.append(["self._group"])
                assert groups in allowed, f"{file}:{node.lineno}: {groups}"
                found += 1
    assert found > 4


@pytest.fixture
def meeting(monkeypatch):
    """The variables of rank 0 of three, and little patience."""
    monkeypatch.setattr(groups, "MESSAGE_AFTER", timedelta(seconds=0.1))
    monkeypatch.delenv("MEGATRON_RL_LAUNCHER", raising=False)
    port = _find_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return monkeypatch, port


def test_missing_ranks_are_named(meeting, capfd):
    monkeypatch, port = meeting
    monkeypatch.setattr(groups, "REPEAT", timedelta(seconds=0.1))
    with pytest.raises(UserError, match="2 of 3 ranks: 1, 2 have not started within 2 s"):
        groups.join_ranks(timedelta(seconds=2))
    waits = f"megatron-rl: rank 0 waits at 127.0.0.1:{port} for 2 of 3 ranks: 1, 2 have not started"
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("megatron")]
    assert (
        lines[0] == f"{waits}; if WORLD_SIZE is left over, press Ctrl-C and unset RANK WORLD_SIZE"
    )


def test_missing_rank_0_is_named_with_its_address(meeting, capfd):
    monkeypatch, port = meeting
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match=f"rank 2 of 3 cannot use 127.0.0.1:{port} as the meeting"):
        groups.join_ranks(timedelta(seconds=1))
    assert (
        f"megatron-rl: rank 2 of 3 waits for rank 0 at 127.0.0.1:{port} (MASTER_ADDR, "
        "MASTER_PORT): it has not started, or this node cannot reach it\n"
    ) in capfd.readouterr().err
