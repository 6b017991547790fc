"""Task creation: files for the trainer, resumed fine-tuning, and errors."""

import copy
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.apps.tasks.tiny_task import build_model
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from research.tasks import fine_tuning
from research.tasks.fine_tuning import FineTuning, build_mixture
from research.tasks.making import compute_digest, draw_distinct, make_once
from research.tasks.measuring import compute_accuracy, encode, sample_accuracy
from research.tasks.settings import TaskSettings
from research.tasks.tokens import build_tokenizer
from research.tasks.worked_solution import Noise, correct_solution, verify_trace
from tools.fine_tuning import IGNORED, update

SMALL = {"train": 20, "heldout": 10, "batch": 8}


def silent(text):
    pass


def test_sets_are_disjoint_and_determined_by_seed():
    settings = TaskSettings("running_sum", 4, **SMALL)
    problems = draw_distinct(settings)
    assert len({problem.question for problem in problems}) == 30
    assert problems == draw_distinct(settings)
    assert problems != draw_distinct(TaskSettings("running_sum", 4, seed=2, **SMALL))


def test_saved_tokenizer_loads_and_encodes_every_solution(tmp_path):
    settings = TaskSettings("running_sum", 16, **SMALL)
    tokenizer = build_tokenizer(200)
    tokenizer.save_pretrained(tmp_path)
    # With a config.json, transformers chooses the tokenizer class by the model type.
    build_model(settings, tokenizer, 200).config.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for problem in draw_distinct(settings):
        trace = correct_solution(problem)
        ids = loaded(trace)["input_ids"]
        assert len(ids) == len(trace)
        assert loaded.decode(ids + [loaded.eos_token_id], skip_special_tokens=True) == trace


def test_mixture_computes_with_the_experts_of_its_settings():
    settings = TaskSettings("running_sum", 4, experts=6, experts_per_token=2, **SMALL)
    tokenizer = build_tokenizer(40)
    model = build_mixture(settings, tokenizer, 40)
    assert model.model.layers[1].mlp.experts.down_proj.shape == (6, 64, 96)  # 3 * 64 / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    problems = draw_distinct(settings)[:4]
    batch = encode(tokenizer, problems, list(map(correct_solution, problems)))
    losses = [update(model, optimizer, *batch) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    with pytest.raises(ValueError, match="experts_per_token=4 must be at least 1 and at most exp"):
        TaskSettings("running_sum", 4, experts=3)


@pytest.mark.parametrize("stage", [0, 1, 2])  # easy problems, correct solutions, errors
def test_resumed_fine_tuning_equals_uninterrupted_one(stage, monkeypatch):
    monkeypatch.setattr(fine_tuning, "NOISY_UPDATES", 2)
    monkeypatch.setattr(fine_tuning, "compute_accuracy", lambda *arguments: 0.9)
    tokenizer = build_tokenizer(40)
    small = TaskSettings("running_sum", 6, hidden=32, heads=1, layers=1, **SMALL)

    def train(updates, state):
        """Run a number of updates in the stage, from a state if given."""
        monkeypatch.setattr(fine_tuning, "MAX_ROUNDS", updates // 2)
        torch.manual_seed(0)
        settings = replace(small, longest_warm_up=updates)
        model, kept = build_model(settings, tokenizer, 40), []
        problems = draw_distinct(settings)[:4]
        tuning = FineTuning(model, tokenizer, settings, problems, report=silent, save=kept.append)
        tuning.progress.stage = stage
        if state is not None:
            tuning.load(state)
        with pytest.raises(ValueError, match="run the same command again"):
            tuning.run()
        return copy.deepcopy(kept[-1])

    whole, parts = train(6, None), train(2, train(4, None))
    assert parts["progress"] == whole["progress"] and whole["progress"]["updates"] == 6
    assert parts["generator"] == whole["generator"]
    for name, weights in whole["model"].items():
        assert torch.equal(parts["model"][name], weights), name
    assert not torch.equal(train(4, None)["model"][name], weights)


def test_failed_fine_tuning_resumes_in_next_call(tmp_path, monkeypatch):
    settings = TaskSettings("running_sum", 4, hidden=32, heads=1, layers=1, **SMALL)
    task = tmp_path / "task"
    with pytest.raises(ValueError, match="size 4 are not learned after 2 updates"):
        make_once(task, replace(settings, longest_warm_up=2), silent)
    assert not task.exists() and [file.name[:6] for file in tmp_path.iterdir()] == [".task-"]
    output = []
    with pytest.raises(ValueError, match="size 4 are not learned after 5 updates"):
        make_once(task, replace(settings, longest_warm_up=3), output.append)
    assert "resuming after 2 updates" in output[0]
    # Other settings do not resume from this state.
    with pytest.raises(ValueError, match="size 4 are not learned after 2 updates"):
        make_once(task, replace(settings, longest_warm_up=2, seed=2), silent)
    # With a low target the task is created, and only the other settings' state remains.
    for name, value in (("EASY_LEARNED", 1e-99), ("LEARNED", 1e-99)):
        monkeypatch.setattr(fine_tuning, name, value)
    monkeypatch.setattr(fine_tuning, "compute_accuracy", lambda *arguments: 0.3)
    assert make_once(task, settings, silent)["updates"] == 5 + 2
    assert len(list(tmp_path.iterdir())) == 2 and not (task / "fine_tuning.pt").exists()


def test_make_once_raises_while_another_process_creates_task(tmp_path, monkeypatch):
    other = subprocess.Popen(
        [sys.executable, "-m", "research.tasks", "running_sum", "--size=4", "--batch=8",
         "--train=20", "--heldout=10", "--output", str(tmp_path / "task")], stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline()  # it has started
        with pytest.raises(ValueError, match="is being made by another `python -m"):
            make_once(tmp_path / "task", TaskSettings("running_sum", 4, **SMALL), silent)
    finally:
        other.kill()
        other.communicate()
    for name in ("EASY_LEARNED", "LEARNED"):
        monkeypatch.setattr(fine_tuning, name, 1e-99)
    monkeypatch.setattr(fine_tuning, "compute_accuracy", lambda *arguments: 0.3)
    make_once(tmp_path / "task", TaskSettings("running_sum", 4, **SMALL), silent)
    assert [file.name for file in tmp_path.iterdir()] == ["task"]
    assert {file.name for file in (tmp_path / "task").iterdir()} == {
        "heldout.parquet", "made.json", "model", "train.parquet"
    }  # fmt: skip


@pytest.mark.parametrize("before", [0.9, 0.1])
def test_fine_tuning_interpolates_to_target_accuracy(before, monkeypatch):
    """Errors are trained above the target and correct solutions below it, then interpolated."""
    settings = TaskSettings("running_sum", 4, tolerance=0.001, **SMALL)
    tokenizer = build_tokenizer(40)
    model, kept, rates = build_model(settings, tokenizer, 40), [], []
    tuning = FineTuning(model, tokenizer, settings, [], report=silent, save=kept.append)

    def update(draw, size, noise):
        """Add 1 to every weight; the accuracy moves with the weights."""
        rates.append(noise.rate)
        for weights in model.state_dict().values():
            weights.add_(1.0)

    start = copy.deepcopy(model.state_dict())
    name = "model.norm.weight"

    def accuracy(*arguments):
        moved = (model.state_dict()[name] - start[name]).mean().item()
        return before + (-0.4 if before > 0.5 else 0.15) * moved

    monkeypatch.setattr(tuning, "_update", update)
    monkeypatch.setattr(fine_tuning, "NOISY_UPDATES", 1)
    monkeypatch.setattr(fine_tuning, "compute_accuracy", accuracy)
    assert tuning._learn_errors(0.2) == pytest.approx(0.3, abs=0.0005)
    assert rates == ([0.2, 0.2] if before > 0.5 else [0.0, 0.0]) and len(kept) == 1
    moved = 1.5 if before > 0.5 else 4 / 3
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(
            weights - start[name], torch.full_like(weights, moved), rtol=0, atol=0.01
        )
    # If no interpolation has the target accuracy, an error names the tolerance.
    monkeypatch.setattr(
        fine_tuning, "compute_accuracy", lambda *arguments: float(accuracy() > 0.45)
    )
    model.load_state_dict(start)
    with pytest.raises(ValueError, match=r"tolerance=0\.001 is too small"):
        tuning._learn_errors(0.2)


def test_corrections_are_learned_before_uncorrected_errors(monkeypatch):
    settings, shares = TaskSettings("running_sum", 4, corrected=0.5, **SMALL), []
    tokenizer, kept = build_tokenizer(100), []
    model = build_model(settings, tokenizer, 100)
    problems = draw_distinct(settings)[:4]
    tuning = FineTuning(model, tokenizer, settings, problems, report=silent, save=kept.append)
    tuning.progress.stage = 2
    monkeypatch.setattr(tuning, "_update", lambda draw, size, noise: shares.append(noise.corrected))
    monkeypatch.setattr(fine_tuning, "NOISY_UPDATES", 1)
    accuracies = iter([0.0, 0.8, 0.8, 0.3])
    monkeypatch.setattr(fine_tuning, "sample_accuracy", lambda *arguments: next(accuracies))
    assert tuning.run()["success"] == 0.3
    assert shares == [1.0, 1.0, 0.5] and [state["progress"]["stage"] for state in kept] == [2, 3, 3]
    monkeypatch.setattr(fine_tuning, "sample_accuracy", lambda *arguments: 0.3)
    tuning.progress.stage = 2
    with pytest.raises(ValueError, match="corrections are not learned"):
        tuning.run()


def test_gap_is_equivalent_to_masked_tokens():
    """A gap equals that many masked tokens; the solution still attends to the question."""
    settings = TaskSettings("running_sum", 4, **SMALL)
    tokenizer = build_tokenizer(40)
    torch.manual_seed(0)
    model = build_model(settings, tokenizer, 40)
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    problems = draw_distinct(settings)[:2]
    tokens, labels = encode(tokenizer, problems, [correct_solution(p) for p in problems])
    begin = int((labels[0] != IGNORED).int().argmax())

    def by_hand(tokens, gap):
        filled = torch.cat([tokens[:, :begin], tokens[:, :1].repeat(1, gap), tokens[:, begin:]], 1)
        mask = torch.ones_like(filled)
        mask[:, begin : begin + gap] = 0
        with torch.no_grad():
            logits = model(input_ids=filled, attention_mask=mask).logits
        logits = torch.cat([logits[:, begin - 1 : begin], logits[:, begin + gap : -1]], 1)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, begin:].flatten(), reduction="sum"
        ).item() / len(tokens)

    other = tokens.clone()
    other[:, 0] = tokens[:, 0].flip(0) if tokens[0, 0] != tokens[1, 0] else tokens[:, 1]
    losses = {
        (gap, which): update(model, frozen, inputs, labels, gap)
        for gap in (0, 7)
        for which, inputs in enumerate((tokens, other))
    }
    for (gap, which), loss in losses.items():
        assert loss == pytest.approx(by_hand((tokens, other)[which], gap), rel=1e-5)
    assert len(set(losses.values())) == 4


def test_gap_gives_small_problems_distance_of_large_ones(monkeypatch):
    settings, gaps = TaskSettings("running_sum", 20, **SMALL), []
    monkeypatch.setattr(fine_tuning, "update", lambda *arguments: gaps.append(arguments[-1]))
    tokenizer = build_tokenizer(200)
    model = build_model(settings, tokenizer, 200)
    tuning = FineTuning(model, tokenizer, settings, [], report=silent, save=lambda state: None)
    for size in (16, 20):
        tuning._update(settings.kind.draw_easy, size, Noise(0.0))
    assert gaps == [4 * (20 - 16), 0]  # of `+3=?`


def test_fine_tuned_model_makes_errors_where_noise_was(tmp_path):
    settings = TaskSettings("running_sum", 4, noise="late", heldout=64)
    made = make_once(tmp_path / "task", settings, silent)
    assert abs(made["success"] - 0.3) < 0.015
    thirds = made["slips_by_third"]
    assert sum(thirds) == pytest.approx(1) and thirds[2] > 0.6, thirds


@pytest.mark.parametrize(
    ("stage", "average", "share"),
    [(0, 1000.0, 1.0), (0, 0.75, 0.5), (0, 0.02, 0.1), (1, 1000.0, 0.5 ** (50 / 400))],
)
def test_learning_rate_decays_with_progress(stage, average, share, monkeypatch):
    rates = []

    def update(model, optimizer, tokens, labels, gap):
        rates.append(optimizer.param_groups[0]["lr"])
        return average

    monkeypatch.setattr(fine_tuning, "update", update)
    settings = TaskSettings("running_sum", 4, longest_warm_up=51, **SMALL)
    tokenizer = build_tokenizer(40)
    model = build_model(settings, tokenizer, 40)
    tuning = FineTuning(model, tokenizer, settings, [], report=silent, save=lambda state: None)
    tuning.progress.average, tuning.progress.stage = average, stage
    with pytest.raises(ValueError, match="not learned after 51"):
        tuning._learn_solutions(settings.kind.draw, 4, 0.99)
    assert rates[50] == pytest.approx(settings.learning_rate * share)
    assert rates[0] <= settings.learning_rate / 50  # linear rise


def test_make_once_reuses_its_task_and_keeps_other_files(tmp_path):
    settings = TaskSettings("running_sum", 4, **SMALL)
    made = {"digest": compute_digest(settings), "settings": asdict(settings), "success": 0.3}
    (tmp_path / "made.json").write_text(json.dumps(made))
    assert make_once(tmp_path, settings, silent) == made
    # The limit on updates does not matter.
    assert make_once(tmp_path, replace(settings, longest_warm_up=9), silent) == made
    # An earlier version had no setting for experts, and made none.
    made["settings"] = {k: v for k, v in made["settings"].items() if not k.startswith("experts")}
    (tmp_path / "made.json").write_text(json.dumps(made))
    assert make_once(tmp_path, settings, silent) == made
    with pytest.raises(ValueError, match=r"other settings \(experts=0, not 8\)"):
        make_once(tmp_path, replace(settings, experts=8), silent)
    with pytest.raises(ValueError, match=r"other settings \(size=4, not 5\)"):
        make_once(tmp_path, TaskSettings("running_sum", 5, **SMALL), silent)
    (tmp_path / "made.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="contains no task"):
        make_once(tmp_path, settings, silent)
    assert (tmp_path / "thesis.tex").exists()


def test_make_once_reuses_task_of_another_version_and_reports_it(tmp_path):
    settings = TaskSettings("running_sum", 4, **SMALL)
    made = {"digest": "of other code", "settings": asdict(settings), "success": 0.3}
    (tmp_path / "made.json").write_text(json.dumps(made))
    output = []
    assert make_once(tmp_path, settings, output.append) == made
    assert len(output) == 1 and "made by another version" in output[0]


def test_computed_accuracy_matches_sampled_one():
    """Compare both for a model trained equally on two answers per question."""

    @dataclass(frozen=True)
    class FixedAnswer:
        question: str
        answer: str

        def solve(self, writer):
            writer.write(self.answer)

    torch.manual_seed(0)
    tokenizer = build_tokenizer(40)
    model = build_model(TaskSettings("running_sum", 4, **SMALL), tokenizer, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    questions = ("1+1=?", "22+3=?-1=?", "7")
    problems = [FixedAnswer(question, answer) for question in questions for answer in ("1", "234")]
    batch = encode(tokenizer, problems, [problem.answer for problem in problems])
    for _ in range(60):
        update(model, optimizer, *batch)
    computed = compute_accuracy(model, tokenizer, problems[1::2])
    sampled = sample_accuracy(model, tokenizer, problems[1::2], seed=1)
    assert 0.2 < computed < 0.8
    # Four standard errors of a share of 2048 samples.
    assert abs(sampled - computed) < 4 * (computed * (1 - computed) / 2048) ** 0.5


def test_created_task_loads_in_run(tmp_path, monkeypatch):
    """Create the smallest task, which takes a few seconds."""
    # The model's accuracy does not matter here.
    for name in ("EASY_LEARNED", "LEARNED"):
        monkeypatch.setattr(fine_tuning, name, 1e-30)
    settings = TaskSettings(
        "running_sum", 4, success=0.49, tolerance=0.48, hidden=32, heads=1, layers=1, **SMALL
    )
    monkeypatch.setattr(fine_tuning, "compute_accuracy", lambda *arguments: 0.49)
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
        ({"task": "sum"}, "choose one of running_sum"),
        ({"size": 3}, "4 to 256 terms"),
        ({"size": -1}, "4 to 256 terms"),
        ({"success": 0.0}, "must lie between"),
        ({"tolerance": 0.4}, "must lie between"),
        ({"corrected": 1.0}, "below 1"),
        ({"hidden": 65}, r"multiple of 32 \* heads"),
    ],
)
def test_impossible_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskSettings(**{"task": "running_sum", "size": 16} | settings)
