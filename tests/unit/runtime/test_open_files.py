"""The limit of open files: raised at start, and refused where it cannot suffice."""

import resource
import subprocess
import sys

import pytest

from megatron_rl.runtime import open_files

RAISED = """
import resource
from megatron_rl.runtime.processes import prepare_environment
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (180, hard))
prepare_environment()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""


def test_soft_limit_is_raised_to_hard_one():
    done = subprocess.run(
        [sys.executable, "-c", RAISED], capture_output=True, text=True, check=True
    )
    soft, hard, before = map(int, done.stdout.split())
    assert hard == before
    assert soft == (hard if 0 <= hard < open_files.MOST else open_files.MOST)


@pytest.fixture
def limit(monkeypatch):
    def set_limit(hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (180, hard))

    return set_limit


def test_limit_too_small_for_ranks_is_named(limit):
    layout = {"tensor": 8, "pipeline": 4, "context": 1, "expert": 1}
    groups = open_files.group_sizes(1024, **layout)
    limit(1535)  # 1,023 sockets and 512 other files
    assert open_files.limit_problem(1024, groups, on_cuda=True) is None
    limit(1534)
    problem = open_files.limit_problem(1024, groups, on_cuda=True)
    assert problem is not None
    assert "1,024 processes needs up to 1,535 open files" in problem and "is 1,534" in problem
    limit(resource.RLIM_INFINITY)
    assert open_files.limit_problem(1024, groups, on_cuda=False) is None
    limit(4096)
    assert open_files.limit_problem(1024, groups, on_cuda=False) is None
    limit(2048)  # on the CPU every group of Megatron has sockets
    assert open_files.limit_problem(1024, groups, on_cuda=False) is not None


def test_limited_address_space_is_named_with_its_cure(monkeypatch):
    limits = iter([resource.RLIM_INFINITY, 6 << 30])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (next(limits), -1))
    assert open_files.describe_address_space() is None
    text = open_files.describe_address_space()
    assert "6.0 GiB of address space (ulimit -v)" in text and "ulimit -v unlimited" in text
