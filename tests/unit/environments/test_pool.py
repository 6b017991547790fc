"""The pool: what one conversation does costs no other one its answers, and no process is left."""

import os
import select
import shutil
import signal
import time

import pytest

from megatron_rl.config.sections import EnvironmentSection, WorkersSection
from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
    read_answer,
)
from megatron_rl.environments.pool import EnvironmentPool
from tests.running import assert_end

HERE = "tests.unit.environments.misbehaving"
SHORT, LONG = 1.0, 60.0  # seconds; nothing that answers at all comes near the first one


class Talk:
    """Runs conversations of given turns to their ends, each as fast as its answers arrive."""

    def __init__(self, pool, *, row=None, patience=120):
        self.pool, self.row, self.patience = pool, row, patience

    def __call__(self, scripts):
        """Return the answers of each conversation."""
        for place in range(len(scripts)):
            self.pool.begin(place, self.row or f'{{"name": "row{place}"}}', place + 10)
            self.pool.send(place, scripts[place][0])
        answers, open_ = [[] for _ in scripts], set(range(len(scripts)))
        deadline = time.monotonic() + self.patience
        while open_:
            assert time.monotonic() < deadline, f"conversations {open_} do not end: {answers}"
            for place, result in self.pool.poll(5.0):
                answers[place].append(result)
                over = isinstance(result, EnvironmentFailure) or result.done
                if over or len(answers[place]) == len(scripts[place]):
                    self.pool.end(place)
                    open_.remove(place)
                else:
                    self.pool.send(place, scripts[place][len(answers[place])])
        return answers


def open_pool(name, *, limit=LONG, echo=str, module=HERE, workers=None, **settings):
    settings = {"max_context_tokens": 1, "on_error": "zero", **settings}
    name = f"{module}:{name}"
    environment = EnvironmentSection(name=name, time_limit_seconds=limit, **settings)
    return EnvironmentPool(environment, WorkersSection(**workers or {}), echo=echo)


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def short(lines):
    with open_pool("Obedient", limit=SHORT, echo=lines.append) as pool:
        yield Talk(pool)


def expected(place, turns):
    """The answers of a conversation in which nothing happens."""
    return [Answer(f"row{place} {place + 10} {n} {'/'.join(turns[:n])}")
            for n in range(1, len(turns) + 1)]  # fmt: skip


def test_answers_are_of_their_conversation():
    scripts = [["a", "b b", "c"], ["x"], ["", "é\n\u2028\x00"]] * 4
    with open_pool("Obedient") as pool:
        pool.start()
        assert pool.tools == []
        assert Talk(pool)(scripts) == [expected(n, turns) for n, turns in enumerate(scripts)]
        assert pool.answered == 24


def test_conversations_outlive_a_cleaner_of_temporary_files(short):
    """It has removed the folder in which each process has one of its own."""
    scripts = [["a", "b"]] * 4
    assert short(scripts) == [expected(n, turns) for n, turns in enumerate(scripts)]
    for _ in range(1000):  # processes that end remove theirs at the same time
        shutil.rmtree(short.pool._temporary, ignore_errors=True)
    assert not short.pool._temporary.exists()
    assert short(scripts) == [expected(n, turns) for n, turns in enumerate(scripts)]


def test_calls_wait_together(tmp_path):
    scripts = [[f"wait-for {tmp_path / 'mark'}"]] * 12 + [["a", f"touch {tmp_path / 'mark'}"]]
    with open_pool("Obedient") as pool:
        assert Talk(pool)(scripts) == [expected(n, turns) for n, turns in enumerate(scripts)]


BAD = {  # turn: (kind, words of its one line)
    "die": ("failed", "failed in turn 2: its process died twice, exit status -11"),
    "exit": ("failed", "failed in turn 2: SystemExit: 3 ("),
    "raise": ("failed", "failed in turn 2: LookupError: broken on purpose ("),
    "late": ("failed", "failed in turn 2: TimeoutError: of a client ("),
    "lose": ("lost", "lost its infrastructure in turn 2: InfrastructureError: no sandbox left ("),
    "long 10000000": ("failed", "an observation of 10,000,000 characters; shorten it to at most"),
    "return nan": ("failed", "the reward nan; return a finite number"),
    "return infinity": ("failed", "the reward inf; return a finite number"),
    "return text-reward": ("failed", "the reward '1'; return a finite number"),
    "return text": ("failed", "returned 'a text'; return megatron_rl.environments.Answer"),
    "return nothing": ("failed", "returned None; return megatron_rl.environments.Answer"),
    "return number-observation": ("failed", "the observation 3; return a text, or a list of"),
    "return policy-message": ("failed", "with a role of user, tool, system"),
    "return no-content": ("failed", "return a text, or a list of messages as {'role': 'user'"),
    "return object": ("failed", "messages that JSON cannot contain: Object of type object"),
    "return number-done": ("failed", "returned done=1, restarts=False and reason=''; return True"),
}


def test_bad_answer_is_one_line_and_other_conversations_are_unchanged(short):
    """Between conversations that are in progress when a process is killed."""
    good = ["a", "wait 0.2", "b", "c"]
    scripts = [turns for bad in BAD for turns in (["hello", bad, "never"], good)]
    answers = short(scripts)
    for number, (kind, words) in enumerate(BAD.values()):
        first, failure = answers[2 * number]
        assert first == expected(2 * number, ["hello"])[0]
        assert isinstance(failure, EnvironmentFailure)
        assert failure.kind == kind, failure
        assert words in failure.text
        assert failure.text.startswith(f"{HERE}:Obedient ")
        assert "\n" not in failure.text
        assert len(failure.text) < 700
        assert answers[2 * number + 1] == expected(2 * number + 1, good)


def test_tool_that_prints_10_mb_costs_one_short_line(short, lines):
    lines.clear()
    turns = ["print 10000000", "b"]
    assert short([turns]) == [expected(0, turns)]
    deadline = time.monotonic() + 30
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    (line,) = lines
    assert line.endswith("xx [... 10,000,000 characters in this line]")
    assert len(line) < 700


def test_lone_surrogates_are_replaced(short):
    (answers,) = short([["return surrogates", "return surrogate-message"]])
    assert answers[0] == Answer("half ?", reason="cut ?")
    assert answers[1] == Answer([{"role": "tool", "content": "half ?", "name": "t"}])


def test_environment_sees_closed_stdin_and_no_secrets(short, monkeypatch):
    answers = short([["read"], ["modules"]])
    assert answers[0] == [Answer("nothing to read")]
    assert answers[1] == [Answer("")]
    for name in ("SOME_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "secret")
    with open_pool("Obedient", workers={"variables": ["SOME_API_KEY"]}) as pool:
        found = Talk(pool)([["environment"]])[0][0].observation
    assert "SOME_API_KEY" in found and "OTHER_API_KEY" not in found


def test_turn_over_limit_may_have_answer():
    turns = ["a", "sleep 60", "b", "wait 60", "c"]
    with open_pool("Deaf", limit=SHORT) as pool:
        (answers,) = Talk(pool)([turns])
    # Each late call ended its process: in the new one `step` was called for the others alone.
    assert answers[1] == Answer("timed out after 1 turns")
    assert answers[2].observation == "row0 10 2 a/b"
    assert answers[3] == Answer("timed out after 2 turns")
    assert answers[4].observation == "row0 10 3 a/b/c"


def test_environment_keeps_its_own_attributes():
    with open_pool("OwnLimit", max_rewrites=1) as pool:
        assert Talk(pool)([["x"]]) == [[Answer(reward=7.0, done=True)]]


def test_conversation_with_different_replay_is_lost():
    """Only one whose own process was lost: what others do is never a reason to replay."""
    with open_pool("Unsteady", limit=SHORT) as pool:
        scripts = [["hello", "wait 0.1", "a"], ["hello", "die"], ["hello", "sleep 60"]]
        whole, dead, late = Talk(pool)(scripts)
    assert whole[1:] == expected(0, scripts[0][1:])
    assert dead[-1].kind == "lost"
    assert "answered turn 1 differently when the conversation was replayed" in dead[-1].text
    assert late[-1].kind == "timed_out"


def test_replay_repeats_no_side_effect(tmp_path):
    seen = tmp_path / "seen"
    for name, calls in (("Obedient", 2), ("Remembering", 1)):
        seen.unlink(missing_ok=True)
        with open_pool(name, limit=SHORT) as pool:
            turns = [f"count {seen}", "wait 0.1", f"die-once {tmp_path / name}"]
            assert Talk(pool)([turns]) == [expected(0, turns)]
        assert len(seen.read_text().splitlines()) == calls


def test_on_error_end_raises_except_for_time_limit():
    with open_pool("Obedient", limit=SHORT, on_error="end") as pool:
        assert Talk(pool)([["wait 60"]])[0][0].kind == "timed_out"
        assert Talk(pool)([["lose"]])[0][0].kind == "lost"
        with pytest.raises(BrokenEnvironmentError, match=r"turn 2: LookupError: broken on purpose"):
            Talk(pool)([["a", "raise"]])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{HERE}:Missing", "has no function Missing; name one of: .*Obedient"),
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("without a colon", "an environment is named module:class, got 'without a colon'"),
    ],
)
def test_environment_that_cannot_be_loaded_is_refused_at_start(name, words):
    settings = EnvironmentSection(name=name, max_context_tokens=1)
    with EnvironmentPool(settings, echo=str) as pool:
        with pytest.raises(BrokenEnvironmentError, match=words):
            pool.start()
        with pytest.raises(BrokenEnvironmentError, match="did not start"):
            pool.poll(5.0)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("RaisesAtOnce", "failed", "failed in turn 1: KeyError: 'no such row' ("),
        ("Hangs", "timed_out", "did not answer turn 1: making it, or repeating its"),
        ("DeafAndSlow", "timed_out", "did not answer turn 1: making it, or repeating its"),
    ],
)
def test_environment_that_cannot_be_made_is_failure_of_first_turn(name, kind, words):
    with open_pool(name, limit=SHORT) as pool:
        for (failure,) in Talk(pool)([["a"], ["b"]]):
            assert failure.kind == kind
            assert words in failure.text


def test_factories_and_plain_functions_are_environments():
    with open_pool("plain") as pool:
        assert Talk(pool)([["a", "b"]]) == [[Answer("A"), Answer("B")]]


def test_place_is_reused_while_old_call_is_in_progress(short):
    pool = short.pool
    pool.begin(0, '{"name": "old"}', 1)
    pool.send(0, "wait 0.3")
    pool.end(0)
    assert short([["a", "wait 0.5"]]) == [expected(0, ["a", "wait 0.5"])]
    pool.begin(0, '{"name": "old"}', 1)
    pool.send(0, "x")
    select.select([pool._link], [], [], 30)  # its answer has arrived, and is not polled
    pool.end(0)
    assert short([["a", "b"]]) == [expected(0, ["a", "b"])]


def test_processes_end_with_pool_busy_or_not():
    with open_pool("Obedient") as pool:
        for place, turn in enumerate(("pid", "pid")):
            pool.begin(place, "{}", 0)
            pool.send(place, turn)
        pids = []
        while len(pids) < 2:
            pids += [int(one.observation) for _, one in pool.poll(30.0)]
        assert len(set(pids)) == 2
        pool.send(0, "spin")
    assert_end(pids)


def test_process_killed_between_two_calls_is_replaced(short):
    pool = short.pool
    pool.begin(0, '{"name": "row"}', 1)
    pool.send(0, "pid")
    ((_, pid),) = pool.poll(30.0)
    os.kill(int(pid.observation), signal.SIGKILL)
    pool.send(0, "b")
    assert pool.poll(30.0)[0][1].kind == "lost"  # since it is asked for its number again
    pool.end(0)


def test_replay_from_journal_repeats_no_side_effect(tmp_path):
    seen, journal = tmp_path / "seen", tmp_path / "calls" / "journal"
    turns = [f"count {seen}", "b", f"count {seen}"]
    first = [expected(n, turns) for n in range(2)]
    with open_pool("Obedient") as pool:
        pool.use_journal(journal)
        assert Talk(pool)([turns[:2]] * 2) == [one[:2] for one in first]
    (file,) = journal.iterdir()
    with file.open("ab") as opened:
        opened.write(b'{"turn": "cut')  # as a killed process leaves it
    with open_pool("Obedient") as pool:
        pool.use_journal(journal)
        assert Talk(pool)([turns] * 2) == first
        # Without a call from the journal, with one where the state has to be made again by
        # calling `step` for the earlier turns.
        calls = 2 + 2 + 2
        assert len(seen.read_text().splitlines()) == calls
        pool.use_journal(journal)  # the same: goes on
        assert Talk(pool)([["b"], ["b"]]) == [expected(0, ["b"]), expected(1, ["b"])]
        pool.use_journal(None)
    assert len(seen.read_text().splitlines()) == calls
    ends = sum(file.read_bytes().count(b"\n") for file in journal.iterdir())
    assert ends == 4 + 4  # 2 x 2; then 2 x 1, and two of the last call


@pytest.mark.parametrize(
    ("observation", "problem"),
    [
        ([{"role": "user", "content": "", "id": "x" * 2_000_000}], "2,000,002 characters"),
        ([{"role": "tool", "content": "", "x": {"y" * 2_000_000: 1}}], "2,000,003 characters"),
        ([{"role": "user", "content": ""}] * 300_000, "300,000 messages"),
        ([{"role": "tool", "content": "a", "image": "a.png"}], "with the key image; models here"),
    ],
)
def test_observations_have_limits_of_all_keys_and_no_media(observation, problem):
    with pytest.raises(TypeError, match=problem):
        read_answer(Answer(observation), name="a:B")
    whole = [{"role": "user", "content": "x" * 1_000_000}]
    assert read_answer(Answer(whole), name="a:B")["observation"] == whole
