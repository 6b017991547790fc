"""The tiny task: correct answers, disjoint sets, and a tokenizer that transformers loads."""

import json
import random

import pytest

from megatron_rl.apps.tasks import tiny_task as tiny
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.rewards.math_answer import verify_math_answer

# 4 + 8 - 3 - 9: 4, 12 -> 2, -1 -> 9, 0
PROBLEM = tiny.Problem(4, (("+", 8), ("-", 3), ("-", 9)))


def test_solution_has_every_step_and_boxed_answer():
    assert PROBLEM.question == "Work out 4 + 8 - 3 - 9 modulo 10."
    assert PROBLEM.solution(random.Random(0), 0.0) == "4+8=2-3=9-9=0\n\\boxed{0}"
    assert PROBLEM.answer == 0


def test_noise_equals_rate_of_wrong_steps():
    generator = random.Random(0)
    wrong = [PROBLEM.solution(generator, 1.0) for _ in range(200)]
    assert all(solution[4] != "2" for solution in wrong)  # every first step is wrong
    # The result is right where the three errors, each 1 to 9, cancel modulo 10: for each of the
    # 81 first two the third is determined, and allowed unless the first two cancel: 72 of 729.
    right = sum(solution.endswith("{0}") for solution in wrong)
    assert abs(right / 200 - 72 / 729) < 0.06


def test_sets_are_disjoint_and_determined_by_seed():
    settings = tiny.Settings(train=70, heldout=30, shortest=2, longest=2)
    # There are 10 * 20 = 200 problems, so that some of 100 random ones would repeat.
    first = tiny.draw_distinct(random.Random("x"), settings, 100)
    assert len(set(first)) == 100
    assert first == tiny.draw_distinct(random.Random("x"), settings, 100)


def test_saved_tokenizer_and_data_load(tmp_path):
    settings = tiny.Settings()
    tokenizer = tiny.build_tokenizer(128)
    tokenizer.save_pretrained(tmp_path)
    # With a config next to it transformers chooses the tokenizer's class by the model's type.
    tiny.build_model(settings, tokenizer, 128).config.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    generator = random.Random(0)
    problems = tiny.draw_distinct(generator, settings, 20)
    tiny.write_parquet(tmp_path / "set.parquet", problems)
    # 10 tokens around it, 1 for the first operand and 4 for each other one: 11 + 4 * 9 = 47.
    prompts = load_prompts(tmp_path / "set.parquet", loaded, max_prompt_tokens=47)
    for problem, prompt in zip(problems, prompts, strict=True):
        assert len(prompt.token_ids) == 11 + 4 * len(problem.rest)
        assert loaded.decode(prompt.token_ids) == (
            f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
        )
        solution = problem.solution(generator, 0.0)
        ids = loaded(solution)["input_ids"]
        assert len(ids) == 1 + 4 * len(problem.rest) + 4
        text = loaded.decode(ids, skip_special_tokens=True)
        assert text == solution
        assert verify_math_answer(text, prompt.ground_truth, "set")[0] == 1.0


def test_stored_model_is_used_only_for_default_settings(tmp_path):
    """The written weights equal the stored ones bit for bit."""
    from safetensors.torch import load_file

    with pytest.raises(
        ValueError, match=r"default settings only, not for \{'seed': 2\}; with --super"
    ):
        tiny.make_once(tmp_path / "other", tiny.Settings(seed=2))
    assert list(tmp_path.iterdir()) == []
    made = tiny.make_once(tmp_path / "task", tiny.Settings())
    written = load_file(tmp_path / "task" / "model" / "model.safetensors")
    stored = load_file(tiny.STORED)
    assert written.keys() == stored.keys()
    assert all(written[name].equal(stored[name]) for name in stored)
    assert made["updates"] > 0 and 0.25 < made["accuracy"] < 0.42


def test_make_once_reuses_its_task_and_keeps_other_files(tmp_path):
    settings = tiny.Settings()
    stamp = tmp_path / "made.json"
    stamp.write_text(json.dumps({"fingerprint": tiny.compute_fingerprint(settings)}))
    tiny.make_once(tmp_path, settings)
    assert tiny.compute_fingerprint(settings, supervised=True) != tiny.compute_fingerprint(settings)
    stamp.rename(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="is not empty and contains no tiny task"):
        tiny.make_once(tmp_path, settings)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shortest": 5, "longest": 4}, "shortest <= longest"),
        ({"shortest": 2, "longest": 2}, "too many; there are 200"),
    ],
)
def test_impossible_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny.Settings(**settings)
