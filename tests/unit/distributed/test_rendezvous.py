"""Messages of a start that waits for other ranks."""

from datetime import timedelta

import pytest

from megatron_rl.distributed import rendezvous
from megatron_rl.errors import UserError
from megatron_rl.runtime.launcher import _find_port


@pytest.fixture
def meeting(monkeypatch):
    """The variables of rank 0 of three, and little patience."""
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=0.1))
    monkeypatch.delenv("MEGATRON_RL_LAUNCHER", raising=False)
    port = _find_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return monkeypatch, port


def test_missing_ranks_are_named(meeting, capfd):
    monkeypatch, port = meeting
    monkeypatch.setattr(rendezvous, "REPEAT", timedelta(seconds=0.1))
    with pytest.raises(UserError, match="2 of 3 ranks: 1, 2 have not started within 0 s"):
        rendezvous.join_ranks(timedelta(seconds=0.15))
    waits = f"megatron-rl: rank 0 waits at 127.0.0.1:{port} for 2 of 3 ranks: 1, 2 have not started"
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("megatron")]
    assert (
        lines[0] == f"{waits}; if WORLD_SIZE is left over, press Ctrl-C and unset RANK WORLD_SIZE"
    )


def test_missing_rank_0_is_named_with_its_address(meeting, capfd):
    monkeypatch, port = meeting
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match=f"rank 2 of 3 cannot use 127.0.0.1:{port} as the meeting"):
        rendezvous.join_ranks(timedelta(seconds=1))
    assert (
        f"megatron-rl: rank 2 of 3 waits for rank 0 at 127.0.0.1:{port} (MASTER_ADDR, "
        "MASTER_PORT): it has not started, or this node cannot reach it\n"
    ) in capfd.readouterr().err
