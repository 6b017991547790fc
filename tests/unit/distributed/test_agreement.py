"""A failing rank raises its own error; the other ranks raise an error that names it."""

import contextlib
import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from megatron_rl.distributed import agreement
from megatron_rl.distributed.agreement import (
    StragglerBarrier,
    raise_across_ranks,
    run_on_rank_0,
    sync_errors_across_ranks,
)
from megatron_rl.distributed.link import Link
from megatron_rl.runtime.failures import RankTimeoutError
from tests.ranks import run_ranks


def _fail(rank):
    """Return each rank's errors if no rank fails, if rank 1 fails, and if ranks 0 and 1 fail."""
    messages = []
    missing = FileNotFoundError(2, "No such file", "weights")
    for errors in ({}, {1: ValueError("bad")}, {0: KeyError("q_proj"), 1: missing}):
        try:
            raise_across_ranks(errors.get(rank), doing="trying")
            messages.append(None)
        except Exception as error:
            messages.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
    return messages


def _fail_ask_and_write(rank, world_size):
    return _fail(rank), _ask_rank_0(rank), _fail_in_a_block(rank)


@pytest.fixture(scope="module")
def three_ranks():
    return run_ranks(_fail_ask_and_write, 3)


def test_errors_keep_type_and_name_failed_rank(three_ranks):
    first, second, third = (failed for failed, _, _ in three_ranks)
    assert first == [
        None,
        ("OtherRankError", "trying: rank 1: ValueError: bad", []),
        ("KeyError", "'trying: q_proj'", []),
    ]
    assert second == [
        None,
        ("ValueError", "trying: bad", []),
        ("FileNotFoundError", "[Errno 2] No such file: 'weights'", ["trying"]),
    ]
    both = "rank 0: KeyError: 'q_proj'; rank 1: FileNotFoundError: [Errno 2] No such file"
    assert third[:2] == [None, ("OtherRankError", "trying: rank 1: ValueError: bad", [])]
    assert third[2] == ("OtherRankError", f"trying: {both}: 'weights'", [])


def _ask_rank_0(rank):
    messages = [run_on_rank_0(lambda: f"rank {rank}", doing="asking")]
    for error in (ValueError("bad"), KeyError("q_proj")):
        try:
            run_on_rank_0(lambda error=error: _raise(error), doing="asking")
        except Exception as raised:
            messages.append(f"{type(raised).__name__}: {raised}")
    return messages


def _raise(error):
    raise error


def test_run_on_rank_0_broadcasts_results_and_value_errors(three_ranks):
    first, *others = (asked for _, asked, _ in three_ranks)
    assert first == ["rank 0", "ValueError: bad", "KeyError: 'asking: q_proj'"]
    message = "OtherRankError: asking: rank 0: KeyError: 'q_proj'"
    assert others == [["rank 0", "ValueError: bad", message]] * 2


def _exit_late(rank, world_size, folder, late=(0, 2)):
    """Keep ranks 0 and 2 away from the second collective until the others have timed out."""
    raise_across_ranks(None, doing="trying", time_limit=60)
    others = [folder / f"{each}" for each in range(world_size) if each not in late]
    if rank in late:
        # Earlier than the group's own limit of 120 s: the others then get another error.
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in others) and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(1)  # closes its connections
    with pytest.raises(RankTimeoutError) as error:
        raise_across_ranks(None, doing="trying", time_limit=0.5)
    partial = folder / f"partial{rank}"
    partial.write_text(str(error.value))
    partial.rename(folder / f"{rank}")
    while not all(file.exists() for file in others):
        time.sleep(0.02)  # the first to leave would end the others' wait


def test_missing_ranks_are_named_within_limit(tmp_path):
    with contextlib.suppress(AssertionError):  # they exit with status 1
        run_ranks(_exit_late, 3, tmp_path)
    messages = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert messages.keys() == {"1"}
    assert messages["1"].startswith("trying: ranks 0, 2 did not join within 0.5 s (waited ")


def _stop_rank_0(rank, world_size):
    """Return rank 1's error while rank 0, which has the link's store, is stopped."""
    timeout = timedelta(seconds=60)
    meeting = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), timeout=timeout)
    link = Link(rank, trainers=1, engines=1, store=store, timeout=timeout)
    raise_across_ranks(None, doing="trying", time_limit=60, link=link)
    if rank == 0:
        meeting.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    process = psutil.Process(int(meeting.get("process")))
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    agreement._STORE_SECONDS = 0.5
    try:
        with pytest.raises(RankTimeoutError) as error:
            raise_across_ranks(None, doing="trying", time_limit=0.5, link=link)
        return str(error.value)
    finally:
        process.resume()


def test_stopped_rank_0_that_has_the_store_is_named():
    message = run_ranks(_stop_rank_0, 2)[1]
    assert message.startswith("trying: rank 0 did not join within 0.5 s (waited ")


def test_single_process_raises_its_own_error():
    with pytest.raises(ZeroDivisionError, match="trying: by zero"):
        raise_across_ranks(ZeroDivisionError("by zero"), doing="trying")


def _fail_in_a_block(rank):
    messages = []
    for fails in (False, True):
        try:
            with sync_errors_across_ranks(doing="writing"):
                if rank == 0 and fails:
                    raise OSError("disk full")
            messages.append(None)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_error_in_block_is_raised_on_every_rank(three_ranks):
    other = [None, "OtherRankError: writing: rank 0: OSError: disk full"]
    own = [None, "OSError: writing: disk full"]
    assert [written for *_, written in three_ranks] == [own, other, other]


def wait_for_a_slow_rank(rank, world_size):
    """Let rank 1 advance both ranks' clock, waiting until rank 0 has polled again."""
    work = StragglerBarrier("generating", patience=4.0)
    store = work._store
    agreement.time = SimpleNamespace(
        monotonic=lambda: float(store.add("clock", 0)), sleep=lambda _: time.sleep(0.005)
    )

    def pass_time(seconds):
        store.add("clock", seconds)
        polls = store.add("polls", 0) + 2  # one of them may have started before
        while store.add("polls", 0) < polls and not store.check(["raised"]):
            time.sleep(0.005)

    def advance(done):
        work.advance(done, 8)
        pass_time(1)

    work.begin()
    if rank == 1:
        for done in range(1, 7):  # exceeds the patience in total, but not between reports
            advance(done)
    work.finish(while_waiting=lambda: store.add("polls", 1 - rank))
    work.begin()
    if rank == 1:
        pass_time(50)  # both were suspended: a quarter of the patience
        advance(3)
        for _ in range(4):  # no report for as long as the patience
            pass_time(1)
        return None
    with pytest.raises(RankTimeoutError) as raised:
        work.finish(while_waiting=lambda: store.add("polls", 1))
    store.set("raised", "")
    return str(raised.value)


def test_barrier_waits_for_slow_ranks_and_names_stalled_ones():
    message = run_ranks(wait_for_a_slow_rank, 2)[0]
    assert message == (
        "generating: no rank made progress for 4 s; waiting for rank 1, which has done 3 of 8"
    )


def test_barrier_of_one_process_does_not_wait():
    work = StragglerBarrier("generating", patience=1.0)
    work.begin()
    work.advance(1, 2)
    work.finish()
