"""reasoning-gym's tasks: rewards of 0 or 1, the same problems again, no checker that evaluates."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_rl.rewards.reasoning_gym import evaluating_calls, open_task, verify
from tests.unit.rewards.misbehaving_verifiers import read_far_away


class Honest:
    def score_answer(self, answer, entry):
        return self._compare(answer) + _helper(answer)

    def _compare(self, answer):
        return float(answer == "1")

    def generate(self):
        return eval("1 + 1")  # of its own text


class Reckless:
    def score_answer(self, answer, entry):
        return self.parse(answer)

    def parse(self, answer):
        return _read(answer)


class RecklessElsewhere:
    def score_answer(self, answer, entry):
        return read_far_away(answer)


def _read(answer):
    return eval(answer)


def _helper(answer):
    return len(answer)


def test_evaluating_calls_finds_only_reachable_calls():
    assert evaluating_calls(Honest) == []
    assert evaluating_calls(Reckless) == ["eval"]
    assert evaluating_calls(RecklessElsewhere) == ["eval"]


@pytest.mark.parametrize("name", ["binary_matrix", "spiral_matrix", "string_insertion", "n_queens"])
def test_checkers_that_evaluate_answer_are_refused(name):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="would run what a model"):
        open_task(name, seed=1, size=1)


@pytest.mark.slow
def test_generated_file_is_graded_by_checker_of_task(tmp_path):
    pytest.importorskip("reasoning_gym")
    file = tmp_path / "set.parquet"
    command = [sys.executable, "examples/pnpo/make_reasoning_gym.py", "chain_sum", "--count", "5",
               "--settings", '{"max_terms": 3}', "--output", str(file)]  # fmt: skip
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True)
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 5
    for row in rows:
        truth = row["reward_model"]["ground_truth"]

        def grade(text, truth=truth, row=row):
            return verify(text, truth, row["data_source"], row)[0]

        assert grade(f"so <answer>0</answer>, no: <answer> {truth} </answer>") == 1.0
        assert grade(f"<answer>{truth} or so</answer>") == 0.0  # a part of the score is none
        assert grade(f"<answer>{truth}1</answer>") == 0.0
        assert grade(truth) == 1.0  # as a run tries it
        assert grade(f"it is {truth}") == 0.0
        with pytest.raises(ValueError, match="make the file again"):
            verify("", truth + "0", row["data_source"], row)


def test_task_with_many_right_answers_has_no_ground_truth():
    pytest.importorskip("reasoning_gym")
    coloring = open_task("graph_color", seed=1, size=2)[1]["metadata"]["possible_answer"]
    row = {"task": {"name": "graph_color", "seed": 1, "size": 2, "settings": "{}", "index": 1}}
    right = json.dumps({str(vertex): color for vertex, color in coloring.items()})
    assert verify(f"<answer>{right}</answer>", "None", "reasoning_gym", row)[0] == 1.0
    assert verify("<answer>{}</answer>", "None", "reasoning_gym", row)[0] == 0.0
    assert verify("None", "None", "reasoning_gym", row)[0] == 0.0  # as a run tries it


def test_bad_names_and_settings_are_refused():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"has no task 'chain_sums'; it has .*chain_sum"):
        open_task("chain_sums", seed=1, size=1)
    with pytest.raises(ValueError, match="chain_sum with"):
        open_task("chain_sum", seed=1, size=1, settings='{"no_such": 1}')
