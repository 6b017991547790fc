"""Engines on ranks of their own give, bit for bit, what the run on shared ranks gives."""

import hashlib
import json
import signal
import time

import psutil
import pyarrow.parquet as pq
import pytest

from megatron_rl.apps.report.build import build_timeline
from megatron_rl.apps.report.runs import find_runs
from megatron_rl.runs.files import read_metrics, read_rows
from megatron_rl.runtime.interruption import INTERRUPTED
from tests.functional.faults import runs
from tests.functional.routing_runs import make_model
from tests.functional.tiny_runs import HELDOUT, make_task, start_training, training_arguments
from tests.ranks import start_process

SHORT = ("rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.steps=4",
         "trainer.epochs=2", "trainer.minibatches=2", "trainer.checkpoint_every=2",
         "parallel.context=1", "eval.sets={}", "logging.tensorboard=false",
         "optimizer.decay=constant", "optimizer.learning_rate=1.0e-3", "optimizer.warmup_steps=0",
         "logging.traced_responses=8", "rollout.max_response_tokens=16",
         "reward.verifier=tests.functional.sums:parity")  # fmt: skip
EVALUATED = (f"eval.sets={{heldout: {HELDOUT}}}", "eval.every=2", "eval.samples=2")
WINDOWS = "lag.partial_rollouts={every_tokens: 8, cache: %s}"
CASES = {  # settings of both runs, and the number of ranks that only generate
    "short groups first, replay, windows of responses": (
        ("lag.policy=research.lag_policies:LengthLag", "lag.settings={batches: 2, tokens: 16}",
         "replay={capacity: 2, fresh: 0.5}", WINDOWS % "recompute",
         "rollout.max_response_tokens=56", "reward.verifier=tests.functional.sums:grade"), 1),
    "lag 1, dynamic sampling, top-p, replay, adapters alone, data-parallel, 2 + 2 ranks": (
        ("lag.batches=1", "dynamic_sampling.rounds=2", "rollout.top_k=8", "rollout.top_p=0.98",
         "lora={rank: 8, alpha: 16, push: adapters}", "replay={capacity: 2, fresh: 0.5}",
         "parallel.data=2", "trainer.self_test_every=4"), 2),
    "context-parallel with lag 1, engines of two, 2 + 4 ranks": (
        ("lag.batches=1", "parallel.context=2", "rollout.tensor=2", *EVALUATED), 4),
    "lag 3, tensor-parallel, every second sync, replay, 2 + 2 ranks": (
        ("lag.batches=3", "lag.sync_weights_every=2", "parallel.tensor=2",
         "replay={capacity: 2, fresh: 0.5}"), 2),
}  # fmt: skip
# What depends on time, on the number of ranks, or on who computes.
OF_TIME = ("time/", "memory/", "sync/", "rollout/tokens_per_second", "rollout/engine_imbalance")


def train_once(folder, name, *overrides, status=0):
    process = start_training(*SHORT, f"run.dir={folder}", f"run.name={name}", *overrides)
    assert process.wait(timeout=600) == status, process.read()
    return folder / name


def results(run):
    """Return everything that must not depend on where responses are generated."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(OF_TIME)}
        for row in read_metrics(run)
    ]
    tables = {
        f"{kind}/{file.name}": str(pq.read_table(file).to_pylist())
        for kind in ("rollouts", "updates", "eval", "traces")
        for file in sorted((run / kind).rglob("*.parquet"))
    }
    schedule = [json.loads(line) for line in (run / "schedule.jsonl").read_text().splitlines()]
    weights = [hashlib.sha256(file.read_bytes()).hexdigest() for file in
               sorted((run / "model").glob("*.safetensors"))]  # fmt: skip
    return {"weights": weights, "schedule": schedule, "metrics": rows} | tables


def assert_equal(one, other):
    one, other = results(one), results(other)
    assert one.keys() == other.keys()
    for what, value in one.items():
        assert value == other[what], what


@pytest.fixture(scope="module", autouse=True)
def task():
    make_task()


# What they add: the order of short groups, every second sync, and further layouts.
SLOW = ("short groups first, replay, windows of responses",
        "context-parallel with lag 1, engines of two, 2 + 4 ranks",
        "lag 3, tensor-parallel, every second sync, replay, 2 + 2 ranks")  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_run_equals_that_on_shared_ranks(case, tmp_path):
    settings, engine_ranks = CASES[case]
    shared = train_once(tmp_path, "shared", *settings)
    apart = train_once(tmp_path, "apart", *settings, f"parallel.engine_ranks={engine_ranks}")
    assert_equal(shared, apart)
    assert [row["step"] for row in read_metrics(apart)] == list(range(5))
    check_timelines(shared, apart, overlaps=case.startswith("lag 1"))


MAIN_PHASES = ("rollout", "train", "sync")


def check_timelines(shared, apart, *, overlaps):
    """Both groups of ranks have a row in each step, also after a resume.

    overlaps: in steps 2 and 3 the trainers train between their order and its result, for which
    they wait afterwards. A shared rank generates first.
    """
    together, sides = (read_rows(run / "timeline.jsonl") for run in (shared, apart))
    assert [row["step"] for row in together] == [row["step"] for row in sides]
    assert {tuple(row["ranks"]) for row in together} == {("all ranks",)}
    assert {tuple(row["ranks"]) for row in sides} == {("trainers", "engines")}
    if overlaps:
        for one, row in zip(together[1:3], sides[1:3], strict=True):
            own, trainers, engines = (
                list(dict.fromkeys(phase for phase, *_ in ranks if phase in MAIN_PHASES))
                for ranks in (*one["ranks"].values(), *row["ranks"].values())
            )
            assert own == ["rollout", "train", "sync"]
            assert trainers == ["train", "rollout", "sync"]
            assert engines == ["sync", "rollout"]  # the sync of the step before
    (run,) = find_runs([apart])
    drawn = build_timeline(run, most=4)
    assert drawn["steps"][-1] == sides[-1]["step"] and all(drawn["ranks"].values())


@pytest.mark.slow
def test_experts_over_six_ranks_equal_those_on_four_shared_ranks(tmp_path):
    """Tensor, pipeline and expert parallel trainers; an engine of two ranks; windows."""
    process = start_process(make_model, tmp_path / "moe")
    process.join()
    settings = (
        f"model.path={tmp_path}/moe", "reward.verifier=tests.functional.sums:parity",
        "rollout.max_response_tokens=24", "trainer.steps=2", "lag.batches=1",
        WINDOWS % "recompute", "parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=2",
        "parallel.expert_tensor=1", "rollout.tensor=2",
    )  # fmt: skip
    shared = train_once(tmp_path, "shared", *settings)
    assert_equal(shared, train_once(tmp_path, "apart", *settings, "parallel.engine_ranks=2"))


def wait_for_row(process, run, step):
    """Return when the step is recorded; the run must still be going on."""
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) <= step:
        assert process.poll() is None, process.read()
        time.sleep(0.01)


def ranks_of(process):
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda one: one.create_time())


def kill_rank(again, run, rank):
    """After the first step that it makes."""
    process, after = start_training(*again), read_metrics(run)[-1]["step"]
    wait_for_row(process, run, after + 1)
    ranks_of(process)[rank].kill()
    assert process.wait(timeout=300) == 128 + signal.SIGKILL, process.read()
    assert f"rank {rank} was killed by signal 9" in process.read()


@pytest.mark.slow
def test_run_that_ends_on_either_side_equals_that_on_shared_ranks(tmp_path):
    """With windows that keep their cache, so that each end leaves responses that are not whole."""
    settings = ("lag.batches=2", "behavior=engine", "run.resume=auto", WINDOWS % "keep",
                "trainer.checkpoint_every=1", "trainer.steps=8", "rollout.max_response_tokens=24",
                *EVALUATED, "eval.every=4")  # fmt: skip
    shared = train_once(tmp_path, "shared", *settings)
    run = tmp_path / "resumed"
    again = (*SHORT, f"run.dir={tmp_path}", "run.name=resumed", *settings,
             "parallel.engine_ranks=1")  # fmt: skip

    process = start_training(*again)
    wait_for_row(process, run, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == INTERRUPTED, process.read()
    assert "checkpoint saved at step" in process.read()

    answer = tmp_path / "answer.json"
    requests = [
        {"fault": "damage_a_push", "rank": 0},
        {"fault": "run_out_of_memory", "rank": 1, "call": 20},
    ]
    requests = [request | {"arguments": training_arguments(*again)} for request in requests]
    process = start_process(runs.run_all, requests, str(answer))
    process.join(timeout=600)
    damaged, full = json.loads(answer.read_text())
    for ended in (damaged, full):
        assert ended["status"] == 1 and ended["left"] == [], ended["output"]
    assert "checksums differ after the transfer for" in damaged["output"]
    assert "rank 1: OutOfMemoryError: generating with vLLM" in full["output"], full["output"]
    assert "CUDA out of memory. Tried to allocate" in full["output"]

    kill_rank(again, run, 0)  # trains; the engine's rank has failed above
    process = start_training(*again)
    assert process.wait(timeout=600) == 0, process.read()
    assert_equal(shared, run)
    assert [row["step"] for row in read_metrics(run)] == list(range(9))
    check_timelines(shared, run, overlaps=False)


HANGING = ("lag.batches=1", "parallel.engine_ranks=1", "trainer.steps=500",
           "trainer.stall_seconds=20", "resharding.time_limit_seconds=20")  # fmt: skip


@pytest.mark.slow
def test_stopped_engine_ends_both_sides_and_is_named(tmp_path):
    process = start_training(*SHORT, f"run.dir={tmp_path}", "run.name=stopped", *HANGING)
    wait_for_row(process, tmp_path / "stopped", 1)
    ranks = ranks_of(process)
    ranks[1].suspend()
    assert process.wait(timeout=400) == INTERRUPTED
    assert "rank 1 is stopped (SIGSTOP or a debugger)" in process.read()
    assert not any(one.is_running() and one.status() != "zombie" for one in ranks)


@pytest.mark.slow
def test_trainer_stopped_in_a_save_is_named_and_not_engine_that_waits(tmp_path):
    """A save may take longer than what engines do, and the store that they poll is in rank 0."""
    arguments = training_arguments(*SHORT, f"run.dir={tmp_path}", "run.name=stopped", *HANGING)
    answer = tmp_path / "answer.json"
    request = {"fault": "stop_in_a_save", "rank": 0, "arguments": arguments}
    process = start_process(runs.run_all, [request], str(answer))
    process.join(timeout=400)
    (ended,) = json.loads(answer.read_text())
    assert ended["status"] == INTERRUPTED and ended["left"] == [], ended["output"]
    assert "rank 0 is stopped (SIGSTOP or a debugger)" in ended["output"], ended["output"]
