"""Properties of all workers, shown with the real pools."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.sections import RewardSection, WorkersSection
from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
)
from megatron_rl.rewards.broker import MOST_CALLS
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import TIME_LIMIT, Item
from megatron_rl.runtime.interruption import SIGNALS
from megatron_rl.workers import client
from tests.running import assert_end
from tests.unit.environments import test_pool
from tests.unit.environments.test_pool import Talk
from tests.unit.workers.troubles import PER_CONVERSATION, TROUBLES

HERE = "tests.unit.workers.troubles"
TURNS = [f"turn {n}" for n in range(PER_CONVERSATION)]


def open_pool(name, **settings):
    return test_pool.open_pool(name, module=HERE, **settings)


def verifiers(limits=None, **settings):
    reward = RewardSection(verifier=f"{HERE}:verify", **{"time_limit_seconds": 60.0, **settings})
    return VerifierPool(reward, WorkersSection(**limits or {}), echo=str)


def play(pool, rows, turns=TURNS):
    """The results of conversations, one for each row."""
    results, open_ = [[] for _ in rows], set(range(len(rows)))
    for place, row in enumerate(rows):
        pool.begin(place, json.dumps({"name": f"row{place}", **row}), place)
        pool.send(place, turns[0])
    deadline = time.monotonic() + 120
    while open_:
        assert time.monotonic() < deadline, f"{open_} do not end"
        for place, result in pool.poll(5.0):
            results[place].append(result)
            if isinstance(result, EnvironmentFailure) or result.done:
                pool.end(place)
                open_.remove(place)
            else:
                pool.send(place, turns[len(results[place])])
    return results


def expected(place):
    texts = [f"row{place} {place} {n} {turn}" for n, turn in enumerate(TURNS, start=1)]
    return [Answer(text, reward=len(text) / 7, done=n == len(TURNS))
            for n, text in enumerate(texts, start=1)]  # fmt: skip


@pytest.fixture
def job_of_ranks():
    """Signals as in a rank, which blocks those of the job."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ignored = (signal.SIGHUP, signal.SIGQUIT)  # as nohup does, and a shell with `&`
    handlers = [signal.signal(request, signal.SIG_IGN) for request in ignored]
    yield
    for request, handler in zip(ignored, handlers, strict=True):
        signal.signal(request, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, old)


def test_signals_work_in_all_that_users_start(job_of_ranks):
    """timeout, Popen.terminate, another signal, and Process.terminate."""
    wanted = [124, -15, -3, -15]
    with open_pool("Reports") as pool, verifiers() as graders:
        assert json.loads(Talk(pool, row="{}")([["signals"]])[0][0].observation) == wanted
        (grade,) = graders.verify_all([Item("signals", "", "")])
    assert json.loads(grade.reason) == wanted


def test_signals_to_the_job_end_no_conversation():
    with open_pool("Trouble") as pool:
        pool.begin(0, '{"name": "row0"}', 0)
        pool.send(0, TURNS[0])
        assert pool.poll(30.0)[0][1] == expected(0)[0]
        broker = psutil.Process(pool._process.pid)
        for process in (broker, *broker.children()):
            for request in SIGNALS:
                process.send_signal(request)
        pool.send(0, TURNS[1])
        assert pool.poll(30.0)[0][1] == expected(0)[1]


def test_trouble_of_one_is_its_own(tmp_path):
    """All kinds among innocent ones: each fails with its reason, and no other one is changed."""
    rows = []
    for trouble in TROUBLES:
        rows += [{"trouble": trouble, "folder": str(tmp_path)}, {}]
    with open_pool("Trouble", limit=2.0, workers={"memory_gib": 1.0}) as pool:
        results = play(pool, rows)
        broker = psutil.Process(pool._process.pid)
        for place in range(1, len(rows), 2):
            assert results[place] == expected(place), rows[place - 1]
        found = {trouble: results[2 * n][-1] for n, trouble in enumerate(TROUBLES)}
        kinds = {one: getattr(result, "kind", "answered") for one, result in found.items()}
        late = ("blocks", "hangs", "spins", "hangs_in_threads", "stops", "blocks_later",
                "leaves_everything_and_blocks")  # fmt: skip
        fine = ("prints_50_mb", "leaves_everything", "hang_in_close", "writes_to_its_socket",
                "forks_and_returns", "forks_and_exits", "changes_its_process",
                "starts_programs")  # fmt: skip
        for trouble, kind in kinds.items():
            wanted = "timed_out" if trouble in late else "answered" if trouble in fine else "failed"
            assert kind == wanted, found[trouble]
        for name in late:
            assert "the call took longer than 2 s" in found[name].text
        assert "SystemExit: bad usage" in found["exits"].text
        assert "SystemExit: in a task" in found["exits_in_a_task"].text
        assert "CancelledError" in found["cancels"].text
        for name in ("fills_memory", "keeps_memory_full"):
            assert "workers.memory_gib=1 GiB; raise it" in found[name].text
        assert "NamelessError: <exception str() failed> (" in found["raises_without_text"].text
        assert len(found["raises_100_mb"].text) < 700
        assert "the reward a value of type int; ret" in found["returns_10_gb_number"].text
        assert "died twice, exit status 1" in found["breaks_what_replies_need"].text
        wait_until(lambda: len(broker.children(recursive=True)) == 1)  # the template
    assert not any(Path("/dev/shm", file.read_text()).exists() for file in tmp_path.iterdir())


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_left_of_a_verifiers_call(tmp_path):
    with verifiers(time_limit_seconds=1.0) as pool:
        (grade,) = pool.verify_all([Item("leave", "", str(tmp_path))])
        assert grade.reason == TIME_LIMIT
        broker = psutil.Process(pool._process.pid)
        wait_until(lambda: len(broker.children(recursive=True)) == 1)
    (file,) = tmp_path.iterdir()
    assert not Path("/dev/shm", file.read_text()).exists()


def test_what_calls_of_a_verifier_leave_does_not_add_up():
    """Descriptors and processes: neither is out before the process is replaced."""
    with verifiers(workers=1) as pool:
        grades = pool.verify_all([Item("keep", "0", "")] * 2 * MOST_CALLS)
        assert {one.reward for one in grades} == {4.0}
        broker = psutil.Process(pool._process.pid)
        wait_until(lambda: len(broker.children(recursive=True)) <= MOST_CALLS + 2)


def test_memory_that_other_calls_keep_fails_no_call():
    with verifiers({"memory_gib": 1.0}, workers=1) as pool:
        grades = pool.verify_all([Item("keep", str(2**28), "")] * 12)
        assert [one.reward for one in grades] == [4.0] * 12


def test_odd_calls_of_a_verifier_are_answered_once():
    texts = ["socket", "fork", "nameless", "abc"]
    with verifiers(on_error="zero", workers=1) as pool:
        grades = [pool.verify_all([Item(text, "", "")])[0] for text in texts]
    assert [one.reward for one in grades] == [6.0, 4.0, 0.0, 3.0]


def test_thread_that_a_call_leaves_costs_no_other_call():
    """It keeps the interpreter inside C code; the next call has another process."""
    with verifiers(time_limit_seconds=1.0) as pool:
        texts = ["thread", "x" * 300_000, "thread", "abc"]
        grades = [pool.verify_all([Item(text, "", "")])[0] for text in texts]
    assert [one.reward for one in grades] == [6.0, 0.0, 6.0, 3.0]
    assert {one.reason for one in grades} == {"scored"}


def test_sending_never_waits_for_a_worker(tmp_path):
    """300 KB to each of several that read only after the last has been sent its own."""
    with open_pool("Deaf", limit=60.0) as pool:
        for place in range(4):
            pool.begin(place, json.dumps({"name": place, "folder": str(tmp_path)}), 0)
            pool.send(place, TURNS[0])
        answered = 0
        while answered < 4:
            answered += len(pool.poll(30.0))
        wait_until(lambda: all((tmp_path / f"{place} is deaf").exists() for place in range(4)))
        for place in range(4):
            pool.send(place, "x" * 300_000)
        (tmp_path / "listen").touch()
        answers = []
        while len(answers) < 4:
            answers += pool.poll(30.0)
        assert [one for _, one in answers] == [Answer("300000", done=True)] * 4


def test_time_limit_is_of_a_conversations_own_work():
    """Many at once on a few cores, each of which computes for 8 x 0.2 s: over the limit."""
    with open_pool("Works", limit=1.0) as pool:
        (alone,) = play(pool, [{}])
        together = play(pool, [{}] * 8 * (os.cpu_count() or 1))
    assert alone == [Answer(reward=1.0, done=True)]
    assert together == [alone] * len(together)


def test_waiting_for_manager_is_not_a_calls_own_time():
    """Many print more than a pipe holds, and all wait for the one process that reads it."""
    rows = [{"trouble": "prints_50_mb", "turn": 1}] * 4 * (os.cpu_count() or 1)
    with open_pool("Trouble", limit=1.0) as pool:
        results = play(pool, rows)
    assert [one[-1] for one in results] == [expected(place)[-1] for place in range(len(rows))]


def test_threads_buy_no_time():
    """20 threads on fewer cores wait for each other; the limit counts what they use together."""
    if (os.cpu_count() or 1) >= 20:
        pytest.skip("needs more threads than cores")
    with open_pool("Threads", limit=1.0) as pool:
        ((failure,),) = play(pool, [{}])
        assert failure.kind == "timed_out"


SECRETS = """
import os
from tests.unit.environments.test_pool import Talk
from tests.unit.workers.test_properties import Item, open_pool, verifiers
os.environ["TRAINER"] = str(os.getpid())
with open_pool("Reports", workers={"variables": ["TRAINER"]}) as pool:
    print(Talk(pool, row="{}")([["secrets"]])[0][0].observation)
with verifiers({"variables": ["TRAINER"]}) as pool:
    print(pool.verify_all([Item("secrets", "", "")])[0].reason)
"""


def test_secrets_of_the_run_cannot_be_read():
    """Neither in /proc of the parent nor of any other process; and no signal reaches the run."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12):
        pytest.skip("the kernel hides other processes from Linux 6.12 on")
    command = [sys.executable, "-c", SECRETS]
    if os.getuid() == 0:  # root of a container, which has no such capabilities
        command = ["setpriv", "--bounding-set=-sys_admin,-perfmon", *command]
    environment = os.environ | {"SECRET_KEY": "top-secret"}
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout
    reports = [json.loads(line) for line in output.splitlines()]
    assert reports == [{"secret": False, "can_signal": False}] * 2


def test_close_may_be_async(tmp_path):
    with open_pool("ClosesAsync") as pool:
        pool.begin(0, json.dumps({"name": "a", "folder": str(tmp_path)}), 0)
        pool.send(0, "x")
        pool.poll(30.0)
        pool.end(0)
    assert (tmp_path / "closed").exists()


def test_module_that_never_loads_is_named_and_ended(tmp_path, monkeypatch):
    (tmp_path / "sleeps_as_it_loads.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(client, "START_SECONDS", 2.0)
    with test_pool.open_pool("Any", module="sleeps_as_it_loads") as pool:
        with pytest.raises(BrokenEnvironmentError, match=r"sleeps_as_it_loads.* not start in 2 s"):
            pool.start()
        broker = psutil.Process(pool._process.pid)
        processes = [broker, *broker.children(recursive=True)]
    assert_end(one.pid for one in processes)


def test_manager_that_does_not_answer_is_ended_by_close(monkeypatch):
    monkeypatch.setattr(client, "_CLOSE_SECONDS", 1.0)
    with open_pool("Trouble") as pool:
        pool.start()
        pids = [
            pool._process.pid,
            *(one.pid for one in psutil.Process(pool._process.pid).children()),
        ]
        os.kill(pool._process.pid, signal.SIGSTOP)
    assert_end(pids)


def test_plain_agents_do_not_share_threads():
    rows = [{"prompt": [{"role": "user", "content": "q"}], "hangs": n % 4 == 0} for n in range(24)]
    with open_pool("PlainAgent", limit=2.0) as pool:
        results = play(pool, rows)
    for row, result in zip(rows, results, strict=True):
        assert result[-1] == Answer(reward=1.0, done=True, reason="agent ended") or row["hangs"]
    assert {one[-1].kind for one in results[::4]} == {"timed_out"}


def test_everything_ends_with_a_killed_trainer(tmp_path):
    """Also where a conversation's processes have left their session and their parent."""
    pid = os.fork()
    if pid == 0:
        try:
            pool = open_pool("Trouble")
            row = {"name": "a", "trouble": "leaves_everything", "turn": 1, "folder": str(tmp_path)}
            pool.begin(0, json.dumps(row), 0)
            pool.send(0, "x")
            pool.poll(60.0)
            (tmp_path / "ready").touch()
            time.sleep(1000)
        finally:
            os._exit(1)
    wait_until((tmp_path / "ready").exists, 60)
    processes = psutil.Process(pid).children(recursive=True)
    assert len(processes) >= 8
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    blocks = [file.read_text() for file in tmp_path.iterdir() if file.name != "ready"]
    assert blocks and not any(Path("/dev/shm", block).exists() for block in blocks)


ENDS_WHILE_LISTED = """
import asyncio, os, subprocess, types
from megatron_rl.workers import broker
from megatron_rl.workers.template import adopt_orphans
from tests.running import is_running

adopt_orphans()
unit = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"], start_new_session=True)
children_of = broker.children_of
while len(left := children_of(unit.pid)) < 2:
    pass

def slow_list(pid):
    found = children_of(pid)
    if unit.pid in found:
        unit.kill()
        os.waitid(os.P_PID, unit.pid, os.WEXITED | os.WNOWAIT)
    return found

broker.children_of = slow_list
manager = broker.Broker(None, {})
manager._template = types.SimpleNamespace(pid=0)
asyncio.run(manager._end_left())
assert not any(map(is_running, left)), left
"""


def test_process_that_ends_while_its_siblings_are_listed_leaves_nothing():
    """Its own process became a child of the manager only after the list was read."""
    subprocess.run([sys.executable, "-c", ENDS_WHILE_LISTED], check=True, timeout=60)


NO_CHILDREN = """
import pytest
from megatron_rl.environments.interface import BrokenEnvironmentError
from tests.unit.workers.test_properties import open_pool
with open_pool("Trouble") as pool, pytest.raises(BrokenEnvironmentError) as error:
    pool.start()
print(error.value)
"""


def test_kernel_without_list_of_children_is_refused():
    """In a mount namespace without /proc."""
    hide = ["unshare", "--mount", "--", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
    if os.getuid():
        hide.insert(1, "--map-root-user")
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs mount namespaces")
    command = [*hide, sys.executable, "-c", NO_CHILDREN]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert output.stdout == (
        f"{HERE}:Trouble needs /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)\n"
    )


FEW_PROCESSES = """
import resource
from tests.unit.workers.test_properties import expected, open_pool, play
resource.setrlimit(resource.RLIMIT_NPROC, (6, 6))
with open_pool("Trouble") as pool:
    assert play(pool, [{}] * 8) == [expected(place) for place in range(8)]
"""


@pytest.mark.slow
def test_conversations_wait_while_the_system_has_no_room_for_processes(tmp_path):
    """As another user, to whom a limit applies: of 6, three are those of the pool and its user."""
    if os.getuid():
        pytest.skip("needs root, to become another user")
    become = ["setpriv", "--reuid", "65534", "--clear-groups"]
    become += [f"--{one}-caps=+dac_read_search,+dac_override" for one in ("inh", "ambient")]
    command = [*become, sys.executable, "-B", "-c", FEW_PROCESSES]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)})


@pytest.mark.slow
def test_closed_standard_streams_of_the_run_change_nothing(tmp_path):
    program = f"""
from tests.unit.workers.test_properties import expected, open_pool, play
with open_pool("Trouble") as pool:
    assert play(pool, [{{}}]) == [expected(0)]
open({str(tmp_path / "done")!r}, "w")
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "done").exists()


def test_journal_with_other_lines_repeats_only_their_calls(tmp_path):
    """As a full disk or a power failure leaves it."""
    lives = []
    for _ in range(2):
        with open_pool("Counts") as pool:
            pool.use_journal(tmp_path / "journal")
            lives.append(play(pool, [{"folder": str(tmp_path)}]))
        (file,) = [one for one in (tmp_path / "journal").iterdir() if one.stat().st_size]
        first, second, *rest = file.read_bytes().splitlines(keepends=True)
        other = [b"\0" * 100 + b"\n", b'"x"\n', b'{"turn": 1}\n', b"[" * 10_000 + b"\n", b"\xff\n"]
        file.write_bytes(b"".join([first, second[:50], *other, second, *rest, second[:50]]))
    assert lives[0] == lives[1] == [expected(0)]
    assert len((tmp_path / "calls").read_text()) == PER_CONVERSATION


@pytest.mark.parametrize("size", [0, 1000])
def test_journal_that_cannot_be_written_ends_the_run(tmp_path, size):
    """A limit of the size of files in place of a full disk: no byte, or a part of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    pool = open_pool("Trouble")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pool:
        pool.use_journal(tmp_path)
        with pytest.raises(BrokenEnvironmentError, match=f"cannot write its journal {tmp_path}"):
            play(pool, [{}])


def test_journal_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with open_pool("Trouble") as pool:
        pool.use_journal(tmp_path)
        with pytest.raises(BrokenEnvironmentError, match=r"IsADirectoryError: .*a.jsonl"):
            play(pool, [{}])


def test_failed_and_late_calls_are_not_repeated_by_a_resumed_run(tmp_path):
    troubles = ("raises", "blocks", "crashes")
    rows = [{"trouble": one} for one in troubles]
    lives = []
    for _ in range(2):
        with open_pool("Trouble", limit=1.0) as pool:
            pool.use_journal(tmp_path)
            lives.append(play(pool, rows))
            lives.append(len(psutil.Process(pool._process.pid).children(recursive=True)))
    assert lives[0] == lives[2]
    assert lives[3] == 1  # no conversation has had a process


def open_leaver(**settings):
    return test_pool.open_pool("Leaver", module="tests.unit.workers.leftovers", **settings)


def test_temporary_files_end_with_their_process_and_a_server_of_the_module_with_the_run():
    lines = []
    with open_leaver(limit=5.0, echo=lines.append) as pool:
        folder = pool._temporary
        (first,), (late,), (failed,) = play(pool, [{}, {"hangs": True}, {"floods": True}])
        assert (first.reason, late.kind, failed.kind) == ("here", "timed_out", "failed")
        assert [one[0].reason for one in play(pool, [{}, {}])] == ["here", "here"]
        deadline = time.monotonic() + 60
        while sorted(one.name for one in folder.iterdir()) != ["server", "server.py"]:
            assert time.monotonic() < deadline, list(folder.rglob("*"))
            time.sleep(0.02)
        pool.report_failures()
        counted = [line for line in lines if "conversations: environment" in line]
        assert len(counted) == 2 and any("the reason" in line for line in counted), lines[-3:]
    assert not folder.exists()
    assert not client._processes_with(f"TMPDIR={folder}".encode())


def test_killed_manager_leaves_nothing():
    with open_leaver() as pool:
        play(pool, [{}])
        mark = f"TMPDIR={pool._temporary}".encode()
        assert client._processes_with(mark)  # the server, which no template has
        pool._process.kill()
        with pytest.raises(BrokenEnvironmentError, match="has ended by itself"):
            while True:
                pool.poll(1.0)
        assert not client._processes_with(mark)
    assert not pool._temporary.exists()


def test_rewards_too_large_for_float32_are_their_own_responses_failure():
    reward = RewardSection(verifier="tests.unit.workers.leftovers:verify", on_error="zero")
    lines = []
    with VerifierPool(reward, WorkersSection(), cores=1, echo=lines.append) as pool:
        texts = ["1", "1e39", "1e308", "-2", "nan"]
        results = pool.verify_all([Item(text, "", "") for text in texts])
        assert [one.reward for one in results] == [2.0, 0.0, 0.0, -4.0, 0.0]
        assert "3 grades failed" in lines[-1]
        left = [list(one.iterdir()) for one in pool._temporary.iterdir() if one.name.isdigit()]
        assert sum(map(len, left)) <= 1  # of the call whose process is being ended
