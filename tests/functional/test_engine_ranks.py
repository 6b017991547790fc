"""Engines on ranks of their own give, bit for bit, what the run on shared ranks gives."""

import hashlib
import json
import signal
import time

import psutil
import pyarrow.parquet as pq
import pytest

from megatron_rl.runs.files import read_metrics
from megatron_rl.runtime.interruption import INTERRUPTED
from tests.functional.tiny_runs import CUT, TASK, make_task, start_training

SHORT = ("rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.steps=4",
         "trainer.epochs=2", "trainer.minibatches=2", "trainer.checkpoint_every=2",
         "parallel.context=1", "eval.sets={}", "logging.tensorboard=false",
         "optimizer.decay=constant", "optimizer.learning_rate=1.0e-3", "optimizer.warmup_steps=0",
         "logging.traced_responses=8", *CUT)  # fmt: skip
EVALUATED = (f"eval.sets={{heldout: {TASK}/heldout.parquet}}", "eval.every=2", "eval.samples=2")
TWO = ("parallel.tensor=2", "rollout.tensor=2")
CASES = {  # settings of both runs, and the number of ranks that only generate
    "lag 1": (("lag.batches=1",), 1),
    "lag 1, LoRA": (("lag.batches=1", "lora={rank: 8, alpha: 16}"), 1),
    "lag 2, engine's log-probs, 2 + 2 ranks": (("lag.batches=2", "behavior=engine", *TWO), 2),
    "lag 3, evaluated, replay, every second sync": (
        ("lag.batches=3", "lag.sync_weights_every=2", "replay={capacity: 2, fresh: 0.5}",
         *EVALUATED), 1),
    "lag 1, dynamic sampling, data-parallel, 2 + 1 ranks": (
        ("lag.batches=1", "dynamic_sampling.rounds=2", "parallel.data=2",
         "trainer.self_test_every=2"), 1),
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


SLOW = ("lag 1", "lag 1, LoRA")  # the first is contained in that with dynamic sampling


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_run_equals_that_on_shared_ranks(case, tmp_path):
    settings, engine_ranks = CASES[case]
    shared = train_once(tmp_path, "shared", *settings)
    apart = train_once(tmp_path, "apart", *settings, f"parallel.engine_ranks={engine_ranks}")
    assert_equal(shared, apart)
    assert [row["step"] for row in read_metrics(apart)] == list(range(5))


def wait_for_row(process, run, step):
    """Return when the step is recorded; the run must still be going on."""
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) <= step:
        assert process.poll() is None, process.read()
        time.sleep(0.01)


def ranks_of(process):
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda one: one.create_time())


def test_run_that_ends_on_either_side_is_resumed_exactly(tmp_path):
    settings = ("lag.batches=2", "parallel.engine_ranks=1", "run.resume=auto",
                "trainer.checkpoint_every=1", "trainer.steps=8", *EVALUATED)  # fmt: skip
    whole = train_once(tmp_path, "whole", *settings)
    run = tmp_path / "resumed"
    again = (*SHORT, f"run.dir={tmp_path}", "run.name=resumed", *settings)

    process = start_training(*again)
    wait_for_row(process, run, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == INTERRUPTED, process.read()
    assert "checkpoint saved at step" in process.read()

    for step, rank, side in ((3, 1, "generates"), (5, 0, "trains")):
        process = start_training(*again)
        wait_for_row(process, run, step)
        ranks_of(process)[rank].kill()
        assert process.wait(timeout=300) == 128 + signal.SIGKILL, side
        assert f"rank {rank} was killed by signal 9" in process.read()

    process = start_training(*again)
    assert process.wait(timeout=600) == 0, process.read()
    assert_equal(whole, run)


@pytest.mark.parametrize(
    ("rank", "side"), [(1, "generates"), pytest.param(0, "trains", marks=pytest.mark.slow)]
)
def test_stopped_rank_of_either_side_ends_both_and_is_named(rank, side, tmp_path):
    settings = ("lag.batches=1", "parallel.engine_ranks=1", "trainer.steps=500",
                "trainer.stall_seconds=20", "resharding.time_limit_seconds=20")  # fmt: skip
    process = start_training(*SHORT, f"run.dir={tmp_path}", "run.name=stopped", *settings)
    wait_for_row(process, tmp_path / "stopped", 1)
    ranks = ranks_of(process)
    ranks[rank].suspend()
    assert process.wait(timeout=400) == INTERRUPTED, side
    assert f"rank {rank} is stopped (SIGSTOP or a debugger)" in process.read()
    assert not any(one.is_running() and one.status() != "zombie" for one in ranks)
