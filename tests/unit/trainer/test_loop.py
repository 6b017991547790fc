"""The loop around fakes: what happens in which order, and with which weights."""

import functools
import json
import math
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import parse_config
from megatron_rl.distributed.topology import Topology
from megatron_rl.rewards.verifier import FAILED, VerifierError
from megatron_rl.rollouts.grading import Grader
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import PHASES, evaluation_scores, read_metrics
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import BackgroundWriter, PhaseClock
from megatron_rl.trainer.build_engines import collective_timeout
from megatron_rl.trainer.evaluation import EngineAnswers, Evaluator
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.types import Response
from tests.unit.trainer.scripted import (
    PROMPTS,
    ScriptedEngine,
    ScriptedPool,
    make_config,
    make_keeper,
    run_loop,
)

OF_OTHERS = ("reference", "critic")  # phases of runs that have these models


def test_step_generates_once_scores_once_and_reuses(tmp_path):
    events, trainer = run_loop(tmp_path)
    kinds = [event[0] for event in events]
    # 3 epochs x 2 minibatches
    push = ["actor sleeps", "push"]
    step = ["generate", "engine sleeps", "behavior", "actor wakes up", *["update"] * 6, *push]
    # weights first, evaluation before training, two steps, evaluation after the second
    assert kinds == [*push, "generate", *step, *step, "generate"]
    updates = [event[1] for event in events if event[0] == "update"]
    # behavior log-probs are -(updates when frozen): 0 in step 1, -6 throughout step 2
    assert updates == [{0.0}] * 6 + [{-6.0}] * 6
    pushes = [event[1:] for event in events if event[0] == "push"]
    assert pushes == [(0, 0), (1, 6), (2, 12)]  # version and updates of what the engine received
    generated = [event for event in events if event[0] == "generate"]
    assert [event[1] for event in generated] == [0, 0, 1, 2]  # never a stale version
    assert generated[0][2] == generated[3][2]  # evaluations differ by the weights alone
    assert generated[1][2] != generated[2][2]  # rollouts of two steps do not repeat
    assert trainer.checkpoints.saved == [1, 2]


def test_unusable_updates_are_skipped_counted_and_kept(tmp_path):
    """Two steps of six updates: the first and the eighth have no gradient."""
    _, trainer = run_loop(tmp_path, unusable=(1, 8))
    first, second = read_metrics(tmp_path)[1:]
    for row in (first, second):
        assert (row["train/updates"], row["train/updates_skipped"]) == (5, 1)
        assert row["grad/norm"] == 1.0  # of those that happened
    assert "ratio/first_minibatch_max_deviation" not in first  # it never happened
    assert second["ratio/first_minibatch_max_deviation"] == 0.0
    lines = (tmp_path / "skipped_updates" / "skipped_updates.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert [(row["step"], row["update"]) for row in kept] == [(1, 1), (2, 2)]
    assert "norm is nan" in kept[0]["reason"]
    for step in (1, 2):
        name = f"step_{step:06d}.parquet"
        same = [
            pq.read_table(tmp_path / folder / name) for folder in ("skipped_updates", "rollouts")
        ]
        assert same[0].equals(
            same[1].drop_columns(["sampled"])
        )  # skipped_updates/ is never thinned
    assert trainer.actor.updates == 10  # neither the count nor the learning rate's clock went on


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_too_many_skipped_updates_of_one_model_end_run(tmp_path, model):
    """A step has one update of each model: the other one's, which are well, come between."""
    key = {"policy": "unusable", "critic": "critic_unusable"}[model]
    trainer = {"steps": 4, "epochs": 1, "minibatches": 1}
    options = {"sections": {"critic": {}}, "trainer": trainer, key: (1, 2, 3)}
    with pytest.raises(FloatingPointError, match=f"3 consecutive updates of the {model}") as error:
        run_loop(tmp_path, **options)
    section = {"policy": "optimizer", "critic": "critic"}[model]
    assert f"a lower {section}.learning_rate" in str(error.value)


@pytest.mark.parametrize(
    "engine", [ScriptedEngine, functools.partial(ScriptedEngine, shares_devices=False)]
)
def test_policy_sleeps_while_the_critic_trains(tmp_path, engine):
    """Also where no weight sync sends it to sleep, because the engine is on other devices."""
    events, _ = run_loop(tmp_path, sections={"critic": {}}, engine=engine)
    awake, trained = True, 0
    for kind, *_ in events:
        if kind in ("actor sleeps", "actor wakes up"):
            awake = kind == "actor wakes up"
        if kind == "critic":
            trained += 1
            assert not awake
    assert trained


def test_too_many_consecutive_skipped_updates_end_run(tmp_path):
    with pytest.raises(FloatingPointError, match="3 consecutive updates of the policy had no") as e:
        run_loop(tmp_path, unusable=(2, 4, 5, 6))
    assert "optimizer.learning_rate" in str(e.value)


def test_kl_term_scores_reference_once_per_rollout_batch(tmp_path):
    events, _ = run_loop(tmp_path, kl={"coefficient": 0.5, "estimator": "k1"})
    kinds = [event[0] for event in events]
    assert kinds.count("reference") == 2  # two steps
    assert kinds[kinds.index("reference") - 1] == "behavior"
    # k1 of every token is log pi - log pi_ref: 0 + log 2 in step 1, whose policy has log-prob 0.
    row = read_metrics(tmp_path)[1]
    assert row["loss/kl"] == pytest.approx(0.5 * math.log(2))
    assert {key for key in row if key.startswith("time/")} == {
        f"time/{phase}" for phase in (*PHASES, "step") if phase != "critic"
    }


def test_rows_hold_stable_metrics(tmp_path):
    run_loop(tmp_path)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/held/avg@2"] == rows[2]["eval/held/avg@2"] == 0.5
    assert "eval/held/avg@2" not in rows[1]
    needed = {
        "reward/mean", "response/length_mean", "gate/acceptance", "loss/policy", "grad/norm",
        "ratio/first_minibatch_max_deviation", "ratio/prefix_mean_log_std", "sync/seconds",
        "mismatch/logprob_abs_diff_mean", "rollout/tokens_per_second", "sync/bytes_sent",
        "epoch_1/gate/acceptance", "epoch_3/ratio/kl_to_behavior",
        "epoch_3/by_fraction/1.0/prefix_mean_log_std",
        *(f"time/{p}" for p in ("rollout", "reward", "behavior", "train", "sync", "eval", "step")),
    }  # fmt: skip
    assert needed <= rows[1].keys()
    assert rows[1]["reward/mean"] == 0.5
    assert rows[1]["ratio/first_minibatch_max_deviation"] == 0.0
    # frozen at 0 in step 1, the engine reported -0.1 for every token
    assert abs(rows[1]["mismatch/logprob_abs_diff_mean"] - 0.1) < 1e-6


def test_greedy_evaluation_grades_one_response_per_prompt(tmp_path):
    config = make_config()
    config = parse_config(
        config.model_dump() | {"eval": {"temperature": 0, "samples": 2, "sets": {}}}
    )
    prompts = [replace(PROMPTS[0], index=i, ground_truth=answer) for i, answer in enumerate("100")]
    clock, console = PhaseClock(), Console(is_main_rank=False)
    engine, grader = ScriptedEngine([]), Grader(ScriptedPool(), Topology.single())  # answers "0"
    evaluator = Evaluator(
        config,
        EngineAnswers(config, engine, grader, {"held": prompts}, console),
        ["held"],
        Recorder(config, None, None, console, clock),
        console,
    )
    assert evaluator.evaluate(0)["eval/held/avg@1"] == 2 / 3


def test_evaluation_reports_ungraded_and_omits_vote_without_answers(tmp_path, monkeypatch):
    """Each of the four first verdicts has no answer; one ran out of time, two failed."""
    output = []
    monkeypatch.setattr(Console, "echo", lambda self, text="": output.append(text))
    reasons = ["time limit", "verifier failed", "verifier failed", "scored"]
    run_loop(tmp_path, reasons=reasons, trainer={"keep_best": "eval_macro/maj@2"})
    first, _, last = read_metrics(tmp_path)
    shares = [first[f"eval/held/{kind}_fraction"] for kind in ("time_limit", "failed", "truncated")]
    assert shares == [0.25, 0.5, 0.0]
    assert first["eval/held/maj@2"] is None and first["eval_macro/maj@2"] is None
    assert last["eval/held/maj@2"] == 0.5 and last["eval/held/failed_fraction"] == 0.0
    assert any("eval held: 75.00% of the responses were not graded (time limit 25.00%, " in one
               for one in output)  # fmt: skip
    (messages,) = (one for one in output if "keep_best" in one)
    assert messages.startswith(
        "trainer.keep_best=eval_macro/maj@2: no response has an answer to vote"
    )
    assert evaluation_scores(tmp_path, metric="eval_macro/maj@2") == {2: 0.5}


def test_missing_grades_are_counted(tmp_path):
    reasons = ("time limit", "time limit", "ground truth not understood")
    run_loop(tmp_path, reasons=(*["of the evaluation"] * 4, *reasons))
    row = read_metrics(tmp_path)[1]
    # of 4 prompts x 4 responses
    assert row["reward/time_limit_fraction"] == 2 / 16
    assert row["reward/unparsable_truth_fraction"] == 1 / 16


def test_batch_without_any_grade_raises(tmp_path):
    # the evaluation before training has 2 prompts x 2 responses
    with pytest.raises(VerifierError, match=r"none of 4 .* reward.time_limit_seconds=5, .* raise"):
        run_loop(tmp_path, reasons=["time limit"] * 4)


def test_missing_grades_raise_only_over_several_prompts():
    """One prompt decides nothing, however often; two do, also of two calls."""
    response = Response(0, 0, np.zeros(1, np.int32), np.zeros(1, np.float32), "1", "stop", 0)

    def answer(grader):
        grader.begin(PROMPTS[:1], samples=1)(0, response)
        grader.finish(PROMPTS[:1], [response])

    grader = Grader(ScriptedPool("time limit", "equal", "time limit", FAILED), Topology.single())
    for _ in range(2):  # the first was not graded, the second was
        answer(grader)
        grader.check(prompts=2)
    answer(grader)
    grader.check(prompts=2)
    answer(grader)
    with pytest.raises(VerifierError, match="none of 2 responses was graded within"):
        grader.check(prompts=2)
    grader = Grader(ScriptedPool(FAILED, FAILED), Topology.single())
    answer(grader)
    answer(grader)
    with pytest.raises(VerifierError, match="the verifier failed on each of 2 responses"):
        grader.check(prompts=2)


def test_order_of_finished_responses_changes_nothing(tmp_path):
    """Nor does the number that has ended when workers poll: grades belong to places."""
    for name, order in (("first", iter), ("last", reversed)):
        run_loop(tmp_path / name, order=order)
    rows = [read_metrics(tmp_path / name) for name in ("first", "last")]
    timed = ("time/", "memory/", "rollout/tokens_per_second")
    learned = [
        [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run] for run in rows
    ]
    assert learned[0] == learned[1]
    tables = [
        pq.read_table(tmp_path / n / "rollouts/step_000001.parquet") for n in ("first", "last")
    ]
    assert tables[0].equals(tables[1])
    assert rows[0][1]["rollout/engine_imbalance"] == 1.5  # 3 s, on average 2


def test_collective_timeout_exceeds_watchdog():
    def seconds(**sections):
        values = {"model": {"path": "m"}, "data": {"train": "t"}} | sections
        return collective_timeout(parse_config(values)).total_seconds()

    # Twice trainer.stall_seconds, which a checkpoint may take; generating is waited for elsewhere.
    assert seconds() == seconds(rollout={"stall_seconds": 99999}) == 2 * 600 + 120
    assert seconds(resharding={"time_limit_seconds": 9000}) == 9000 + 120 + 120
    assert seconds(trainer={"stall_seconds": None}) == 30 * 60


def test_phases_add_up_to_step(tmp_path, monkeypatch):
    """A clock of work, not of seconds: it counts the calls that Python has made."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    monkeypatch.setattr(time, "perf_counter", lambda: float(calls))
    sys.setprofile(count)
    try:
        run_loop(tmp_path)
    finally:
        sys.setprofile(None)
    for row in read_metrics(tmp_path)[1:]:
        phases = {key: row[key] for key in row if key.startswith("time/") and key != "time/step"}
        assert phases.keys() == {f"time/{phase}" for phase in PHASES if phase not in OF_OTHERS}
        assert min(phases.values()) > 0
        for phase in phases:
            peak = row[f"memory/{phase.removeprefix('time/')}_peak_gib"]
            assert peak is None or 0.05 < peak < 24  # of this process: torch alone takes 0.1 GiB
        assert 0.98 * row["time/step"] <= sum(phases.values()) <= row["time/step"]


def test_checkpoint_is_renamed_after_records_are_on_disk(tmp_path):
    """However late the thread is: a kill at any moment loses nothing that is not written again."""
    directory = RunDirectory(tmp_path)
    directory.create(make_config())
    written, late = tmp_path / "written", threading.Event()
    writer = BackgroundWriter()
    writer.submit(late.wait)
    writer.submit(written.touch)

    class Actor:
        topology = Topology.single()

        def digest(self):
            return {"layout": "one", "sum": "0"}

        def check_weights(self): ...

        def save(self, folder):
            folder.mkdir(parents=True)
            assert not written.exists()  # the records are not waited for before they must be
            threading.Timer(0.05, late.set).start()

    complete = directory.checkpoints.complete

    def complete_after_records(step, **stated):
        assert written.exists()
        complete(step, **stated)

    directory.checkpoints.complete = complete_after_records
    keeper = make_keeper(make_config(), directory, wait=writer.wait)
    keeper.done = 1
    keeper.save(Actor())
    assert directory.checkpoints.intact_steps() == [1]


def test_recorder_after_error_writes_nothing_and_raises_on_every_call(tmp_path):
    writer, both = BackgroundWriter(), threading.Event()
    writer.submit(lambda: both.wait() and (tmp_path / "missing" / "rollouts").touch())
    writer.submit((tmp_path / "row").touch)
    both.set()
    for call in (writer.wait, writer.wait, lambda: writer.submit(print)):
        with pytest.raises(FileNotFoundError, match="rollouts"):
            call()
    assert not (tmp_path / "row").exists()


def test_step_without_advantages_still_updates_and_records(tmp_path):
    """As before: weight decay and moments move. What was not computed is null."""
    reasons = ["of the evaluation"] * 4 + ["not the answer"] * 16  # those of step 1
    events, _ = run_loop(tmp_path, reasons=reasons)
    assert [event[0] for event in events].count("update") == 12
    row, other = read_metrics(tmp_path)[1:]
    assert (row["train/computed_fraction"], row["advantage/zero_groups_fraction"]) == (0.0, 1.0)
    assert (row["tokens"], row["ratio/first_minibatch_max_deviation"]) == (0.0, 0.0)
    assert row["policy/entropy"] is row["mismatch/logprob_abs_diff_mean"] is None
    assert row["rollout/entropy"] == pytest.approx(0.1)  # of all that was generated
    table = pq.read_table(tmp_path / "rollouts/step_000001.parquet")
    assert table["behavior_logprobs"].null_count == 16
    assert (other["train/computed_fraction"], other["tokens"]) == (1.0, 16 * 2 * 3)
