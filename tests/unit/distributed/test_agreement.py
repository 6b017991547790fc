"""Errors come up with their own type where they happened, and by name of the rank elsewhere."""

import contextlib
import os
import time

import pytest

from megatron_rl.distributed.agreement import (
    RankTimeoutError,
    raise_together,
    raised_together,
    run_on_rank_0,
)
from tests.ranks import run_ranks


def _fail(rank, world_size):
    """What each rank is told: nobody fails; rank 1 does; ranks 0 and 1 do, each differently."""
    told = []
    missing = FileNotFoundError(2, "No such file", "weights")
    for errors in ({}, {1: ValueError("bad")}, {0: KeyError("q_proj"), 1: missing}):
        try:
            raise_together(errors.get(rank), doing="trying")
            told.append(None)
        except Exception as error:
            told.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
    return told


def test_errors_keep_their_type_and_name_their_rank():
    first, second, third = run_ranks(_fail, 3)
    assert first == [
        None,
        ("RuntimeError", "trying: rank 1: ValueError: bad", []),
        ("KeyError", "'trying: q_proj'", []),
    ]
    assert second == [
        None,
        ("ValueError", "trying: bad", []),
        ("FileNotFoundError", "[Errno 2] No such file: 'weights'", ["trying"]),
    ]
    everybody = "rank 0: KeyError: 'q_proj'; rank 1: FileNotFoundError: [Errno 2] No such file"
    assert third[:2] == [None, ("RuntimeError", "trying: rank 1: ValueError: bad", [])]
    assert third[2] == ("RuntimeError", f"trying: {everybody}: 'weights'", [])


def _ask_rank_0(rank, world_size):
    told = [run_on_rank_0(lambda: f"rank {rank}", doing="asking")]
    for error in (ValueError("bad"), KeyError("q_proj")):
        try:
            run_on_rank_0(lambda error=error: _raise(error), doing="asking")
        except Exception as found:
            told.append(f"{type(found).__name__}: {found}")
    return told


def _raise(error):
    raise error


def test_rank_0_answers_for_all_and_a_wrong_input_is_the_same_error_everywhere():
    first, second = run_ranks(_ask_rank_0, 2)
    assert first == ["rank 0", "ValueError: bad", "KeyError: 'asking: q_proj'"]
    assert second == [
        "rank 0", "ValueError: bad", "RuntimeError: asking: rank 0: KeyError: 'q_proj'"
    ]  # fmt: skip


def _come_late(rank, world_size, told):
    """Rank 1 does not come before rank 0 has given up."""
    if rank == 1:
        while not told.exists():
            time.sleep(0.02)
        os._exit(1)  # the connections are gone
    start = time.monotonic()
    with pytest.raises(RankTimeoutError) as error:
        raise_together(None, doing="trying", time_limit=0.5)
    told.with_suffix(".partial").write_text(f"{time.monotonic() - start:.1f} s: {error.value}")
    told.with_suffix(".partial").rename(told)


def test_a_rank_that_does_not_come_is_an_error_within_the_limit(tmp_path):
    told = tmp_path / "told"
    with contextlib.suppress(AssertionError):  # goodbyes fail
        run_ranks(_come_late, 2, told)
    seconds, message = told.read_text().split(" s: ", 1)
    assert message.startswith("trying: another rank died or did not come: gave up after ")
    assert "(the limit is 0.5 s)" in message and float(seconds) < 30


def test_one_process_raises_its_own_error():
    with pytest.raises(ZeroDivisionError, match="trying: by zero"):
        raise_together(ZeroDivisionError("by zero"), doing="trying")


def _fail_in_a_block(rank, world_size):
    told = []
    for fails in (False, True):
        try:
            with raised_together(doing="writing"):
                if rank == 0 and fails:
                    raise OSError("disk full")
            told.append(None)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_an_error_in_one_rank_s_block_is_everybody_s():
    assert run_ranks(_fail_in_a_block, 2) == [
        [None, "OSError: writing: disk full"],
        [None, "RuntimeError: writing: rank 0: OSError: disk full"],
    ]
