"""The pool: order, hard time limits, crashes that are not grades, no process left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_rl.config.sections import RewardSection, WorkersSection
from megatron_rl.rewards import pool as pool_module
from megatron_rl.rewards.pool import MOST_LINES, VerifierPool
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import GradeResult
from tests.running import assert_end

BY_NAME = "tests.unit.rewards.misbehaving_verifiers:score_by_name"
MISBEHAVING = "tests.unit.rewards.misbehaving_verifiers:verify_scripted"


def as_items(*texts):
    return [Item(text, "truth", "source") for text in texts]


def open_pool(verifier=MISBEHAVING, *, limit=60.0, echo=str, workers_section=None, **settings):
    """A pool in which nothing that answers comes near the limit."""
    reward = RewardSection(verifier=verifier, time_limit_seconds=limit, **settings)
    return VerifierPool(reward, WorkersSection(**workers_section or {}), echo=echo)


@pytest.fixture(scope="module")
def pool():
    """Two workers of a scripted verifier."""
    with open_pool(workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def hurried():
    """The same with a limit for what hangs."""
    with open_pool(workers=2, limit=1.0) as pool:
        yield pool


def test_grades_keep_order_of_items(pool):
    # The first one ends last.
    grade_results = pool.verify_all(as_items("sleep 0.2", *("x" * n for n in range(50))))
    assert [grade_result.reward for grade_result in grade_results] == [9.0, *map(float, range(50))]
    assert grade_results[7] == GradeResult(6.0, "source", "truth")
    assert pool.verify_all([]) == []


def test_texts_of_any_size_and_content_arrive_whole(pool):
    texts = ["\n\r\x00\u2028é\ud800", "y" * 3_000_000]  # the last: far beyond a pipe's buffer
    assert [v.reward for v in pool.verify_all(as_items(*texts))] == [6.0, 3_000_000.0]


def test_workers_are_kept_from_call_to_call(pool):
    pids = [v.reason for _ in range(3) for v in pool.verify_all(as_items(*["pid"] * 20))]
    assert len(pids) == 60
    assert len(set(pids)) <= 2


def test_hang_costs_time_limit_and_only_its_own_reward(hurried):
    grade_results = hurried.verify_all(as_items("ab", "spin", "abc", "sleep 1000", "abcd"))
    limit = GradeResult(0.0, "time limit", None)
    assert grade_results[1] == grade_results[3] == limit
    assert [grade_results[i].reward for i in (0, 2, 4)] == [2.0, 3.0, 4.0]


def test_output_of_verifier_is_printed_by_line_with_its_name():
    lines = []
    with open_pool(echo=lines.append) as pool:
        assert pool.verify_all(as_items("print", "abc"))[1].reward == 3.0
    assert lines == [f"{MISBEHAVING}: noise on standard output", f"{MISBEHAVING}: and on error"]


def test_verifier_that_prints_a_lot_does_not_fill_the_log():
    lines = []
    with open_pool(echo=lines.append) as pool:
        for _ in range(2):
            assert pool.verify_all(as_items("print-5000"))[0].reward == 10.0
    shown = [line for line in lines if line.endswith(" a line")]
    others = [line.removeprefix(f"{MISBEHAVING}: ") for line in lines if line not in shown]
    left_out = [
        int(one.removesuffix(" more lines are not shown").replace(",", "")) for one in others
    ]
    # The second step may begin before all that the first has printed is read.
    assert MOST_LINES <= len(shown) <= 2 * MOST_LINES
    assert len(shown) + sum(left_out) == 2 * 5001


def test_exception_of_verifier_is_raised_with_its_traceback(pool):
    with pytest.raises(VerifierError, match=r"(?s)response 1 of 3.*truth.*LookupError: broken"):
        pool.verify_all(as_items("a", "raise", "b"))
    # Calls in progress then do not leak into the next call.
    assert [v.reward for v in pool.verify_all(as_items("ab", "abc"))] == [2.0, 3.0]


def test_on_error_zero_gives_no_reward_and_is_counted():
    output = []
    with open_pool(workers=2, on_error="zero", echo=output.append) as pool:
        grade_results = pool.verify_all(as_items("a", "raise", "die", "return-nothing", "abc"))
    assert grade_results[1:4] == [GradeResult(0.0, FAILED, None)] * 3
    assert [grade_results[0].reward, grade_results[4].reward] == [1.0, 3.0]
    assert "3 grades failed; the first: the verifier failed on response " in output[-1]


def test_on_error_retry_tries_again_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "RETRY_SECONDS", (0.01, 0.02))
    with open_pool(workers=2, on_error="retry") as pool:
        grade_results = pool.verify_all(as_items("a", f"raise-once {tmp_path / 'mark'}"))
        assert [grade_result.retries for grade_result in grade_results] == [0, 1]
        assert grade_results[1].reason == "source"
        with pytest.raises(VerifierError, match=r"(?s)after 2 new attempts, .*response 1 of 2"):
            pool.verify_all(as_items("a", "raise"))
        assert pool.verify_all(as_items("ab"))[0].reward == 2.0


def test_failed_response_costs_no_other_reward():
    """A verifier that takes lists: what fails in company is judged again, each alone."""
    name = "tests.unit.rewards.misbehaving_verifiers:verify_many_scripted"
    with open_pool(name, workers=2, limit=1.0, on_error="zero") as pool:
        texts = ["a", "raise", *"b" * 9, "sleep 60", "die", "count"]
        grade_results = pool.verify_all(as_items(*texts))
        reasons = [grade_result.reason for grade_result in grade_results]
        assert (reasons[1], reasons[11], reasons[12]) == (FAILED, TIME_LIMIT, FAILED)
        assert [grade_results[i].reward for i in (0, *range(2, 11))] == [1.0] * 10
        # While both are busy, others wait; who becomes free takes a share of them.
        counts = [grade_result.reward for grade_result in pool.verify_all(as_items(*["count"] * 8))]
        assert max(counts) > 1 and min(counts) >= 1


def test_trial_raises_errors_of_run(pool, hurried):
    pool.try_on(Item("", "7", "source"))
    with pytest.raises(
        VerifierError, match=r"did not grade a response within .*limit_seconds=1 in"
    ):
        hurried.try_on(Item("", "sleep 60", "source"))
    with pytest.raises(
        VerifierError, match=r"(?s)verify_scripted returned None; return the reward"
    ):
        pool.try_on(Item("", "return-nothing", "source"))


def test_process_that_dies_over_response_twice_is_error(pool):
    with pytest.raises(VerifierError, match=r"response 0 of 2.*died twice, exit status -11"):
        pool.verify_all(as_items("die", "b"))
    assert pool.verify_all(as_items("ab"))[0].reward == 2.0


def test_process_that_dies_once_is_replaced(pool, tmp_path):
    grade_results = pool.verify_all(as_items("a", f"die-once {tmp_path / 'mark'}", "abc"))
    assert [v.reason for v in grade_results] == ["source"] * 3


def test_worker_loads_neither_torch_nor_vllm(pool):
    assert pool.verify_all(as_items("modules"))[0].reason == ""


def test_first_grade_excludes_import_time():
    program = """
import sys
from megatron_rl.rewards.verifier import MATH_ANSWER, load_verifier
verify = load_verifier(MATH_ANSWER)
loaded = set(sys.modules)
assert verify("so \\\\boxed{7.0}", "7", "set")[0] == 1.0
print(sorted(set(sys.modules) - loaded))
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_verifier_that_cannot_be_loaded_is_error_at_first_use():
    pool = open_pool("megatron_rl.rewards.nowhere:verify")
    with pool, pytest.raises(VerifierError, match=r"(?s)did not start.*No module named .*nowhere"):
        pool.verify_all(as_items("a"))
    pool = open_pool("megatron_rl.rewards.math_answer:no_such_function", workers=2)
    with pool, pytest.raises(VerifierError, match="did not start"):
        pool.start()  # before anything is generated


@pytest.mark.parametrize(
    ("weights", "text", "expected"),
    [
        (
            {},
            "correct format",
            GradeResult(1.5, "scored", None, rewards={"correct": 1, "format": 0.5}),
        ),
        # 2 * 1 - 0.5 * 1/2
        ({"correct": 2.0, "format": -0.5}, "correct format", 1.75),
        ({"correct": 1.0, "fromat": 1.0}, "correct format", "weights has correct, fromat; give"),
        ({"correct": 1.0}, "correct format", "returned rewards named correct, format, and reward"),
        ({"correct": 1.0}, "", "returned a single reward, and reward.weights has correct"),
    ],
)
def test_named_rewards_are_added_up_by_their_weights(weights, text, expected):
    with open_pool(BY_NAME, weights=weights) as pool:
        if isinstance(expected, str):
            with pytest.raises(VerifierError, match=expected):
                pool.verify_all(as_items(text))
            return
        (grade_result,) = pool.verify_all(as_items(text))
        assert expected in (grade_result, grade_result.reward)
        with pytest.raises(VerifierError, match=r"and correct, format for an earlier one|weights"):
            pool.verify_all(as_items("correct"))


def test_worker_without_enough_memory_names_setting():
    with (
        open_pool(workers_section={"memory_gib": 1.0}) as pool,
        pytest.raises(VerifierError, match=r"MemoryError\n.*.*workers.memory_gib=1 GiB; raise it"),
    ):
        pool.verify_all(as_items("fill 2"))
    with open_pool(workers_section={"memory_gib": None}) as pool:
        assert pool.verify_all(as_items("fill 5"))[0].reward == 1.0  # more than the default


def test_wrong_signature_is_one_sentence():
    name = "tests.unit.rewards.misbehaving_verifiers:have_another_signature"
    with open_pool(name) as pool, pytest.raises(VerifierError) as error:
        pool.start()
    assert "Traceback" not in str(error.value)
    assert "a reward of TRL (completions, kwargs)" in str(error.value)


def test_started_pool_has_loaded_verifier(tmp_path, monkeypatch):
    """A verifier in the folder in which the command is started, like a user's own."""
    program = "def score(text, ground_truth, data_source, row):\n    return row['level']\n"
    (tmp_path / "my_rewards.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    with open_pool("my_rewards:score", workers=2) as pool:
        pool.start()
        item = Item("a", "", "", '{"level": 0.5}')
        assert pool.verify_all([item]) == [GradeResult(0.5, "scored", None)]


def test_closed_pool_is_refused():
    pool = open_pool()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.verify_all(as_items("a"))


def test_workers_end_with_killed_parent():
    # One worker has nothing to do, the other one is inside C code that never returns.
    program = f"""
import threading
from megatron_rl.config.sections import RewardSection, WorkersSection
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item
settings = RewardSection(workers=2, time_limit_seconds=600, verifier={MISBEHAVING!r})
pool = VerifierPool(settings)
verdicts = pool.verify_all([Item("pid-later", "", "")] * 2)
pids = {{v.reason for v in verdicts}} | {{str(pool._process.pid)}}
threading.Timer(0.5, lambda: print(*pids, flush=True)).start()
pool.verify_all([Item("spin", "", "")])
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert len(pids) == 3
    assert_end(pids)
    parent.stdout.close()


def test_workers_see_no_secrets(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_DATABASE", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    with open_pool(workers_section={"variables": ["JUDGE_KEY"]}) as pool:
        (grade_result,) = pool.verify_all(as_items("environment"))
    seen = set(grade_result.reason.split(","))
    assert {"PATH", "PYTHONPATH", "JUDGE_KEY"} <= seen
    assert not seen & {"WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_DATABASE"}
    with pytest.raises(VerifierError, match=r"workers.variables names NO_SUCH_KEY, not set"):
        open_pool(workers_section={"variables": ["NO_SUCH_KEY"]})


@pytest.mark.slow
def test_time_in_which_a_job_is_suspended_is_not_a_calls_own():
    """All its processes are stopped for longer than the call may take, as SLURM suspends a job."""
    with open_pool(limit=4.0) as pool:
        session = pool.begin()
        session.submit(0, *as_items("sleep 2"))
        broker = psutil.Process(pool._process.pid)
        while len(job := [broker, *broker.children(recursive=True)]) < 3:  # also template and call
            time.sleep(0.01)
        time.sleep(0.5)
        for process in job:
            process.suspend()
        time.sleep(6.0)
        for process in job:
            process.resume()
        assert [grade.reward for grade in session.finish().values()] == [len("sleep 2")]
