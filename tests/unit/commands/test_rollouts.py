"""`megatron-rl rollouts`: which rollouts are shown, how, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from megatron_rl.cli import main
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rollouts import prompt_text
from tests.made_runs import GROUP, HOSTILE, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two groups of four at each of three steps; rewards 0, 1, 0, 1."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)


def show(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["rollouts", *map(str, words)])
    messages = capsys.readouterr()
    return end.value.code, messages.out, messages.err


def chosen(capsys, *words):
    code, out, _ = show(capsys, *words, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_newest_step_is_shown_with_prompt_response_reward_and_truth(capsys, folder):
    code, out, _ = show(capsys, folder)
    assert code == 0
    assert "step 3 (of the recorded steps 1 to 3): 8 rollouts, mean reward 0.500" in out
    assert out.count("\n    prompt    | <user>What 1?") == out.count("\n    truth     | 7") == 3
    assert f"megatron-rl rollouts {folder} --step 3 --group " in out


def test_closed_pipe_ends_command_silently(folder):
    """As with `megatron-rl rollouts FOLDER | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatron_rl.cli", "rollouts", str(folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_prompt_of_run_without_decoded_tokens_is_named_as_message():
    row = {"prompt": "What?", "prompt_text": None}
    assert prompt_text(row) == "What? (the last message; tokens were not decoded)"
    assert prompt_text(row | {"prompt_text": "<user>What?"}) == "<user>What?"


def test_thinned_step_is_labeled_as_sample(capsys, folder, tmp_path):
    run = shutil.copytree(folder, tmp_path / "run")
    RunDirectory(run).thin_rollouts([1])
    _, out, _ = show(capsys, run, "--step", 1)
    assert "steps 1 to 3): a sample of 4 rollouts, mean reward 0.500" in out
    assert [row["place"] for row in chosen(capsys, run, "--step", 1, "--group", 3)] == [4, 5, 6, 7]


def test_order_and_count_select_rollouts_reproducibly(capsys, folder):
    assert [row["reward"] for row in chosen(capsys, folder, "--order", "best")] == [1, 1, 1]
    worst = chosen(capsys, folder, "--order", "worst", "--count", 4, "--step", 1)
    assert [(row["step"], row["reward"]) for row in worst] == [(1, 0)] * 4
    drawn = [chosen(capsys, folder, "--count", 5) for _ in range(2)]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 5
    assert len(chosen(capsys, folder, "--count", 100)) == 2 * GROUP
    assert "token_ids" not in drawn[0][0] and drawn[0][0]["tokens"] > 0


def test_one_group_is_shown_side_by_side(capsys, folder):
    rows = chosen(capsys, folder, "--step", 2, "--group", 5)
    assert [row["sample_index"] for row in rows] == list(range(GROUP))
    assert {row["prompt_index"] for row in rows} == {5}
    code, out, _ = show(capsys, folder, "--step", 2, "--group", 5)
    assert code == 0 and out.count("  prompt | ") == 1 and out.count("+0.5") == GROUP / 2


def test_conversations_are_shown_turn_by_turn(capsys, tmp_path):
    run = make_run(tmp_path / "run", steps=1, turns=3)
    code, out, _ = show(capsys, run, "--count", 1)
    assert code == 0 and " tokens in 3 turns, ended by itself" in out
    lines = [line.split("|")[0].strip() for line in out.splitlines() if "|" in line]
    roles = [name for name in lines if name]
    turns = ["assistant", "user", "assistant", "new user", "assistant"]  # the last history is new
    assert roles == ["prompt", *turns, "extracted", "truth"]
    (row,) = chosen(capsys, run, "--count", 1)
    assert row["turns"] == 3 and len(row["messages"]) == 5 and "observed" not in row
    table = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    assert row["tokens"] in {len(one["rollout_logprobs"]) for one in table}
    _, out, _ = show(capsys, run, "--group", 3)
    assert out.count("user: ") == 2 * GROUP


def test_model_s_text_cannot_reach_terminal(capsys, folder, tmp_path):
    """Escape sequences and marks that turn a line stand there by their number."""
    for words in (("--count", "8"), ("--group", "7")):
        _, out, _ = show(capsys, folder, *words, "--step", 3)
        assert "\u202e" not in out and "\x1b" not in out
        assert "<202e>" in out and HOSTILE[0] in out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}/nowhere"], "nowhere does not exist; give the folder of a run"),
        (["{run}/.."], "has no rollouts (rollouts/step_*.parquet): give the folder of a run"),
        (
            ["{run}", "--step", "9"],
            "no rollouts of step 9; choose one of its 3 recorded steps from 1 to 3",
        ),
        (["{run}", "--group", "99"], "no responses to prompt 99; choose one of 6, 7"),
    ],
)
def test_missing_selection_lists_available_ones(capsys, folder, words, message):
    code, out, err = show(capsys, *(word.format(run=folder) for word in words))
    assert (code, out) == (1, "")
    assert err.startswith("megatron-rl: error: ") and message in err and err.count("\n") == 1


def test_damaged_file_is_named(capsys, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"no parquet")
    code, _, err = show(capsys, run)
    assert code == 1 and "step_000001.parquet is damaged" in err
