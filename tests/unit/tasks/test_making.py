"""Made tasks: files that the trainer reads, made once; a warm-up that fails says so."""

import copy
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.data.prompts import load_prompts, load_tokenizer
from megatron_rl.tasks import warm_up
from megatron_rl.tasks.making import compute_digest, draw_different, make_once
from megatron_rl.tasks.measuring import IGNORED, compute_success, encode, sample_success
from megatron_rl.tasks.settings import TaskSettings
from megatron_rl.tasks.tokens import build_tokenizer
from megatron_rl.tasks.trace import Noise, right_trace, verify_trace
from megatron_rl.tasks.warm_up import WarmUp, build_model, update

SMALL = {"train": 20, "heldout": 10, "batch": 8}


def silent(text):
    pass


def test_sets_are_disjoint_and_follow_from_the_seed():
    settings = TaskSettings("running_sum", 4, **SMALL)
    problems = draw_different(settings)
    assert len({problem.question for problem in problems}) == 30
    assert problems == draw_different(settings)
    assert problems != draw_different(TaskSettings("running_sum", 4, seed=2, **SMALL))


def test_the_tokenizer_is_read_back_and_knows_every_trace(tmp_path):
    settings = TaskSettings("running_sum", 16, **SMALL)
    tokenizer = build_tokenizer(200)
    tokenizer.save_pretrained(tmp_path)
    # With a config beside it transformers chooses the tokenizer's class by the model's type.
    build_model(settings, tokenizer, 200).config.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for problem in draw_different(settings):
        trace = right_trace(problem)
        ids = loaded(trace)["input_ids"]
        assert len(ids) == len(trace)
        assert loaded.decode(ids + [loaded.eos_token_id], skip_special_tokens=True) == trace


@pytest.mark.parametrize("stage", [0, 1, 2])  # easy problems, right traces, slips
def test_a_warm_up_goes_on_as_if_it_had_not_ended(stage, monkeypatch):
    monkeypatch.setattr(warm_up, "NOISY_UPDATES", 2)
    monkeypatch.setattr(warm_up, "compute_success", lambda *arguments: 0.9)
    tokenizer = build_tokenizer(40)
    small = TaskSettings("running_sum", 6, hidden=32, heads=1, layers=1, **SMALL)

    def train(updates, state):
        """More updates of that stage, after those that led to a state."""
        monkeypatch.setattr(warm_up, "ROUNDS", updates // 2)
        torch.manual_seed(0)
        settings = replace(small, longest_warm_up=updates)
        model, kept = build_model(settings, tokenizer, 40), []
        problems = draw_different(settings)[:4]
        one = WarmUp(model, tokenizer, settings, problems, report=silent, keep=kept.append)
        one.progress.stage = stage
        if state is not None:
            one.load(state)
        with pytest.raises(ValueError, match="the same command goes on from it"):
            one.run()
        return copy.deepcopy(kept[-1])

    whole, parts = train(6, None), train(2, train(4, None))
    assert parts["progress"] == whole["progress"] and whole["progress"]["updates"] == 6
    assert parts["generator"] == whole["generator"]
    for name, weights in whole["model"].items():
        assert torch.equal(parts["model"][name], weights), name
    assert not torch.equal(train(4, None)["model"][name], weights)


def test_what_a_warm_up_has_learned_is_kept_for_the_next_call(tmp_path, monkeypatch):
    settings = TaskSettings("running_sum", 4, hidden=32, heads=1, layers=1, **SMALL)
    task = tmp_path / "task"
    with pytest.raises(ValueError, match="size 4 are not learned after 2 updates"):
        make_once(task, replace(settings, longest_warm_up=2), silent)
    assert not task.exists() and [file.name[:6] for file in tmp_path.iterdir()] == [".task-"]
    said = []
    with pytest.raises(ValueError, match="size 4 are not learned after 5 updates"):
        make_once(task, replace(settings, longest_warm_up=3), said.append)
    assert "going on after 2 updates" in said[0]
    # Another model does not begin with this one.
    with pytest.raises(ValueError, match="size 4 are not learned after 2 updates"):
        make_once(task, replace(settings, longest_warm_up=2, seed=2), silent)
    # Whatever it has learned is enough: the task is made, and only the other one's start left.
    for name, value in (("BEGUN", 1e-99), ("LEARNED", 1e-99)):
        monkeypatch.setattr(warm_up, name, value)
    monkeypatch.setattr(warm_up, "compute_success", lambda *arguments: 0.3)
    assert make_once(task, settings, silent)["updates"] == 5 + 2
    assert len(list(tmp_path.iterdir())) == 2 and not (task / "warm_up.pt").exists()


def test_a_folder_is_made_by_one_process_at_a_time(tmp_path, monkeypatch):
    """The other one would overwrite what this one has kept."""
    other = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.cli", "task", "running_sum", "--size=4", "--batch=8",
         "--train=20", "--heldout=10", "--output", str(tmp_path / "task")], stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline()  # it has begun
        with pytest.raises(ValueError, match="is being made by another `megatron-rl task`"):
            make_once(tmp_path / "task", TaskSettings("running_sum", 4, **SMALL), silent)
    finally:
        other.kill()
        other.communicate()
    for name in ("BEGUN", "LEARNED"):
        monkeypatch.setattr(warm_up, name, 1e-99)
    monkeypatch.setattr(warm_up, "compute_success", lambda *arguments: 0.3)
    make_once(tmp_path / "task", TaskSettings("running_sum", 4, **SMALL), silent)
    assert [file.name for file in tmp_path.iterdir()] == ["task"]
    assert {file.name for file in (tmp_path / "task").iterdir()} == {
        "heldout.parquet", "made.json", "model", "train.parquet"
    }  # fmt: skip


@pytest.mark.parametrize("before", [0.9, 0.1])
def test_the_success_is_met_between_two_rounds(before, monkeypatch):
    """Slips where too many are right, none where too few; the model left lies on the line."""
    settings = TaskSettings("running_sum", 4, tolerance=0.001, **SMALL)
    tokenizer = build_tokenizer(40)
    model, kept, rates = build_model(settings, tokenizer, 40), [], []
    one = WarmUp(model, tokenizer, settings, [], report=silent, keep=kept.append)

    def update(draw, size, noise):
        """Each round moves the success by 0.4 and every weight by 1."""
        rates.append(noise.rate)
        for weights in model.state_dict().values():
            weights.add_(1.0)

    start = copy.deepcopy(model.state_dict())
    some = "model.norm.weight"

    def success(*arguments):
        moved = (model.state_dict()[some] - start[some]).mean().item()
        return before + (-0.4 if before > 0.5 else 0.15) * moved

    monkeypatch.setattr(one, "_update", update)
    monkeypatch.setattr(warm_up, "NOISY_UPDATES", 1)
    monkeypatch.setattr(warm_up, "compute_success", success)
    assert one._learn_slips(0.2) == pytest.approx(0.3, abs=0.0005)
    assert rates == ([0.2, 0.2] if before > 0.5 else [0.0, 0.0]) and len(kept) == 1
    moved = 1.5 if before > 0.5 else 4 / 3
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(
            weights - start[name], torch.full_like(weights, moved), rtol=0, atol=0.01
        )
    # Where no model between has it, that is said.
    monkeypatch.setattr(warm_up, "compute_success", lambda *arguments: float(success() > 0.45))
    model.load_state_dict(start)
    with pytest.raises(ValueError, match=r"tolerance=0\.001 is finer than success can be set"):
        one._learn_slips(0.2)


def test_corrections_are_learned_before_slips_that_stay(monkeypatch):
    """A model that has never seen one would take the first thought for what stands."""
    settings, shares = TaskSettings("running_sum", 4, corrected=0.5, **SMALL), []
    tokenizer, kept = build_tokenizer(100), []
    model = build_model(settings, tokenizer, 100)
    problems = draw_different(settings)[:4]
    one = WarmUp(model, tokenizer, settings, problems, report=silent, keep=kept.append)
    one.progress.stage = 2
    monkeypatch.setattr(one, "_update", lambda draw, size, noise: shares.append(noise.corrected))
    monkeypatch.setattr(warm_up, "NOISY_UPDATES", 1)
    found = iter([0.0, 0.8, 0.8, 0.3])
    monkeypatch.setattr(warm_up, "sample_success", lambda *arguments: next(found))
    assert one.run()["success"] == 0.3
    assert shares == [1.0, 1.0, 0.5] and [state["progress"]["stage"] for state in kept] == [2, 3, 3]
    monkeypatch.setattr(warm_up, "sample_success", lambda *arguments: 0.3)
    one.progress.stage = 2
    with pytest.raises(ValueError, match="corrections are not learned"):
        one.run()


def test_a_gap_moves_a_trace_away_from_its_question():
    """The same as so many tokens between them that nothing looks at; the question is still seen."""
    settings = TaskSettings("running_sum", 4, **SMALL)
    tokenizer = build_tokenizer(40)
    torch.manual_seed(0)
    model = build_model(settings, tokenizer, 40)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    problems = draw_different(settings)[:2]
    tokens, labels = encode(tokenizer, problems, [right_trace(p) for p in problems])
    begin = int((labels[0] != IGNORED).int().argmax())

    def by_hand(tokens, gap):
        filled = torch.cat([tokens[:, :begin], tokens[:, :1].repeat(1, gap), tokens[:, begin:]], 1)
        seen = torch.ones_like(filled)
        seen[:, begin : begin + gap] = 0
        with torch.no_grad():
            logits = model(input_ids=filled, attention_mask=seen).logits
        logits = torch.cat([logits[:, begin - 1 : begin], logits[:, begin + gap : -1]], 1)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, begin:].flatten(), reduction="sum"
        ).item() / len(tokens)

    other = tokens.clone()
    other[:, 0] = tokens[:, 0].flip(0) if tokens[0, 0] != tokens[1, 0] else tokens[:, 1]
    found = {
        (gap, which): update(model, still, given, labels, gap)
        for gap in (0, 7)
        for which, given in enumerate((tokens, other))
    }
    for (gap, which), loss in found.items():
        assert loss == pytest.approx(by_hand((tokens, other)[which], gap), rel=1e-5)
    assert len(set(found.values())) == 4


def test_small_problems_stand_as_far_from_their_question_as_large_ones(monkeypatch):
    settings, gaps = TaskSettings("running_sum", 20, **SMALL), []
    monkeypatch.setattr(warm_up, "update", lambda *arguments: gaps.append(arguments[-1]))
    tokenizer = build_tokenizer(200)
    model = build_model(settings, tokenizer, 200)
    one = WarmUp(model, tokenizer, settings, [], report=silent, keep=lambda state: None)
    for size in (16, 20):
        one._update(settings.kind.draw_easy, size, Noise(0.0))
    assert gaps == [4 * (20 - 16), 0]  # of `+3=?`


def test_a_real_warm_up_slips_where_it_was_shown_to(tmp_path):
    settings = TaskSettings("running_sum", 4, noise="late", heldout=64)
    made = make_once(tmp_path / "task", settings, silent)
    assert abs(made["success"] - 0.3) < 0.015
    thirds = made["slips_by_third"]
    assert sum(thirds) == pytest.approx(1) and thirds[2] > 0.6, thirds


@pytest.mark.parametrize(
    ("stage", "average", "share"),
    [(0, 1000.0, 1.0), (0, 0.75, 0.5), (0, 0.02, 0.1), (1, 1000.0, 0.5 ** (50 / 400))],
)
def test_the_rate_falls_with_what_is_left_to_learn(stage, average, share, monkeypatch):
    rates = []

    def update(model, optimizer, tokens, labels, gap):
        rates.append(optimizer.param_groups[0]["lr"])
        return average

    monkeypatch.setattr(warm_up, "update", update)
    settings = TaskSettings("running_sum", 4, longest_warm_up=51, **SMALL)
    tokenizer = build_tokenizer(40)
    model = build_model(settings, tokenizer, 40)
    one = WarmUp(model, tokenizer, settings, [], report=silent, keep=lambda state: None)
    one.progress.average, one.progress.stage = average, stage
    with pytest.raises(ValueError, match="not learned after 51"):
        one._learn_right(settings.kind.draw, 4, 0.99)
    assert rates[50] == pytest.approx(settings.learning_rate * share)
    assert rates[0] <= settings.learning_rate / 50  # it rises first


def test_what_is_there_is_found_and_what_is_foreign_kept(tmp_path):
    settings = TaskSettings("running_sum", 4, **SMALL)
    made = {"digest": compute_digest(settings), "settings": asdict(settings), "success": 0.3}
    (tmp_path / "made.json").write_text(json.dumps(made))
    assert make_once(tmp_path, settings, silent) == made
    # How long the warm-up might have taken does not matter.
    assert make_once(tmp_path, replace(settings, longest_warm_up=9), silent) == made
    with pytest.raises(ValueError, match=r"other settings \(size=4, not 5\)"):
        make_once(tmp_path, TaskSettings("running_sum", 5, **SMALL), silent)
    (tmp_path / "made.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="holds no task"):
        make_once(tmp_path, settings, silent)
    assert (tmp_path / "thesis.tex").exists()


def test_what_an_earlier_version_made_is_taken_and_said(tmp_path):
    settings = TaskSettings("running_sum", 4, **SMALL)
    made = {"digest": "of other code", "settings": asdict(settings), "success": 0.3}
    (tmp_path / "made.json").write_text(json.dumps(made))
    said = []
    assert make_once(tmp_path, settings, said.append) == made
    assert len(said) == 1 and "made by another version" in said[0]


def test_the_computed_success_is_the_sampled_one():
    """Of a model that has seen each question with two answers, as often one as the other."""

    @dataclass(frozen=True)
    class Said:
        question: str
        answer: str

        def solve(self, pen):
            pen.write(self.answer)

    torch.manual_seed(0)
    tokenizer = build_tokenizer(40)
    model = build_model(TaskSettings("running_sum", 4, **SMALL), tokenizer, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    questions = ("1+1=?", "22+3=?-1=?", "7")
    problems = [Said(question, answer) for question in questions for answer in ("1", "234")]
    batch = encode(tokenizer, problems, [problem.answer for problem in problems])
    for _ in range(60):
        update(model, optimizer, *batch)
    computed = compute_success(model, tokenizer, problems[1::2])
    sampled = sample_success(model, tokenizer, problems[1::2], seed=1)
    assert 0.2 < computed < 0.8
    # 2048 samples: four standard errors of a share.
    assert abs(sampled - computed) < 4 * (computed * (1 - computed) / 2048) ** 0.5


def test_a_made_task_is_what_a_run_reads(tmp_path, monkeypatch):
    """The smallest of all: four terms, learned by a warm-up of a few seconds."""
    # Whatever it has learned by then is taken: this is about files.
    for name in ("BEGUN", "LEARNED"):
        monkeypatch.setattr(warm_up, name, 1e-30)
    settings = TaskSettings(
        "running_sum", 4, success=0.49, tolerance=0.48, hidden=32, heads=1, layers=1, **SMALL
    )
    monkeypatch.setattr(warm_up, "compute_success", lambda *arguments: 0.49)
    folder = tmp_path / "task"
    made = make_once(folder, settings, silent)
    assert (made["prompt_tokens"], made["trace_tokens"]) == (14, 14)
    assert json.loads((folder / "made.json").read_text()) == made
    prompts = load_prompts(
        folder / "heldout.parquet", load_tokenizer(folder / "model"), max_prompt_tokens=14
    )
    assert len(prompts) == 10 and pq.read_metadata(folder / "train.parquet").num_rows == 20
    for prompt in prompts:
        assert len(prompt.token_ids) == 14
        assert verify_trace(prompt.ground_truth, prompt.ground_truth, prompt.data_source)[0] == 1
        assert prompt.messages[0]["content"].replace("?", "") != prompt.ground_truth


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sum"}, "there are running_sum"),
        ({"size": 3}, "4 to 256 terms"),
        ({"size": -1}, "4 to 256 terms"),
        ({"success": 0.0}, "must lie between"),
        ({"tolerance": 0.4}, "must lie between"),
        ({"corrected": 1.0}, "below 1"),
        ({"hidden": 65}, r"multiple of 32 \* heads"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskSettings(**{"task": "running_sum", "size": 16} | settings)
