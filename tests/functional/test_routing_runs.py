"""Real runs that replay routes: an end inside a step changes no bit."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.runs.files import read_metrics
from tests.functional import routing_runs
from tests.functional.test_policy_lag import learned
from tests.functional.tiny_runs import make_task
from tests.ranks import start_process


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    make_task()
    folder = tmp_path_factory.mktemp("routing")
    process = start_process(routing_runs.main, folder)
    process.join(timeout=600)
    assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("whole", ["whole", "engine"])
def test_first_ratio_is_1_and_later_updates_replay_changed_routes(runs, whole):
    rows = read_metrics(runs / whole)[1:]
    assert [row["ratio/first_minibatch_max_deviation"] for row in rows] == [0.0, 0.0]
    assert all(row["epoch_2/routing/changed_fraction"] > 0.01 for row in rows)
    assert all(row["routing/log_ratio_variance_fraction"] >= 0 for row in rows)


def test_engine_and_actor_choose_nearly_the_same_experts(runs):
    """Float32: only near ties may differ."""
    rows = read_metrics(runs / "engine")[1:]
    assert all(row["routing/engine_changed_fraction"] < 0.01 for row in rows)
    assert not any("engine_changed" in key for row in read_metrics(runs / "whole") for key in row)


@pytest.mark.parametrize(
    ("name", "whole"), [(one, end[0]) for one, end in routing_runs.ENDS.items()]
)
def test_run_that_ended_inside_a_step_equals_whole_run(runs, name, whole):
    assert learned(runs / name) == learned(runs / whole)
    ours, whole = (load_file(runs / one / "model" / "model.safetensors") for one in (name, whole))
    assert all(torch.equal(ours[key], tensor) for key, tensor in whole.items())
