"""Tests of `data.epochs`: the steps that it becomes for the prompts of a run."""

import json

import pytest

from megatron_rl.config import ConfigError, dump_config, load_config, parse_config
from megatron_rl.data.prompts import PromptMix, PromptOrder
from megatron_rl.preflight.start import resolve_epochs
from megatron_rl.rollouts.prompt_files import build_order
from megatron_rl.rollouts.schedule import build_schedule
from tests.character_tokenizer import build_tokenizer


def write_rows(file, prompts):
    rows = [{"prompt": prompt, "answer": 1} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def build_config(tmp_path):
    """Return a function that builds a config of 30 prompts, 8 per step, and a set of 10 more."""
    write_rows(tmp_path / "train.jsonl", [f"{n}" for n in range(30)] + ["0", "1"])  # two repeat
    write_rows(tmp_path / "more.jsonl", [f"{n}" for n in range(100, 110)])

    def build(**sections):
        data = {"train": str(tmp_path / "train.jsonl"), "columns": {"answer": "answer"}}
        return parse_config(
            {"model": {"path": str(tmp_path)}, "rollout": {"prompts_per_step": 8},
             "trainer": {"minibatches": 1}} | sections | {"data": data | sections.get("data", {})}
        )  # fmt: skip

    return build


@pytest.mark.parametrize(
    ("epochs", "sections", "steps"),
    [
        (1, {}, 3),  # 30 // 8
        (0.5, {}, 2),  # round(1.5)
        (0.01, {}, 1),
        # 30 // 4 = 7 steps of 4 new prompts per pass; the first step has those of two.
        (2, {"replay": {"fresh": 0.5, "capacity": 4}}, 13),
        # Lag and dynamic sampling do not change how many new prompts a step has.
        (2, {"lag": {"batches": 2}, "dynamic_sampling": {"rounds": 2}}, 6),
    ],
)
def test_epochs_are_whole_passes_of_the_prompt_order(build_config, epochs, sections, steps):
    lines = []
    config, _ = resolve_epochs(build_config(data={"epochs": epochs}, **sections), echo=lines.append)
    assert (config.trainer.steps, config.data.epochs) == (steps, None)
    fresh = config.fresh_groups
    assert lines == [
        f"data.epochs={epochs}: 30 prompts, {fresh} per step, so {30 // fresh} steps per epoch: "
        f"trainer.steps={steps}"
    ]


def test_run_of_two_epochs_draws_no_prompt_a_third_time(build_config):
    replay = {"fresh": 0.5, "capacity": 4}
    config, _ = resolve_epochs(build_config(data={"epochs": 2}, replay=replay))
    order, schedule = build_order(config, [30]), build_schedule(config)
    assert isinstance(order, PromptOrder)
    drawn = [
        index
        for step in range(1, config.trainer.steps + 1)
        for index in order.indices(*schedule.prompts(step))
    ]
    assert max(map(drawn.count, drawn)) == 2
    assert len(drawn) == 2 * (30 - 30 % config.fresh_groups)


def test_mix_is_counted_as_one_and_its_sets_by_weight(build_config, tmp_path):
    sets = {
        "a": {"path": str(tmp_path / "train.jsonl"), "weight": 3},
        "b": {"path": str(tmp_path / "more.jsonl")},
    }
    lines = []
    config, _ = resolve_epochs(
        build_config(data={"train": "", "mix": sets, "epochs": 2}), echo=lines.append
    )
    assert config.trainer.steps == 10  # 2 * (40 // 8), of 6 and 2 prompts: 60 / 30 and 20 / 10
    assert lines[0].endswith(
        "trainer.steps=10; by their weights it passes over data.mix.a 2.0 times, data.mix.b 2.0 "
        "times"
    )
    assert isinstance(build_order(config, [30, 10]), PromptMix)
    # Of the 8 prompts of the first step each set has some, and of 2 new ones of a later step not.
    replay = {"fresh": 0.25, "capacity": 4}
    config = build_config(data={"train": "", "mix": sets}, replay=replay)
    with pytest.raises(ConfigError, match=r"data\.mix: weights 3, 1 give a set none of the 2 new"):
        build_order(config, [30, 10])


def test_prompts_that_are_left_out_are_not_counted(build_config, monkeypatch, tmp_path):
    tokenizer = build_tokenizer(64)  # a token for each character
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64,
              "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": True,
              "hidden_act": "silu"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Of 0 to 29 ten have one digit.
    short, _ = resolve_epochs(
        build_config(data={"epochs": 4, "too_long": "skip", "max_prompt_tokens": 1})
    )
    assert short.trainer.steps == 4  # 4 * (10 // 8)


def test_overrides_give_other_processes_the_same_config(build_config, tmp_path):
    given = build_config(data={"epochs": 3})
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(given))
    assert load_config(file) == given  # nothing sets the steps next to data.epochs
    resolved, overrides = resolve_epochs(given)
    assert overrides == ["trainer.steps=9", "data.epochs=null"]
    assert load_config(file, overrides) == resolved
    assert resolve_epochs(resolved) == (resolved, [])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": "none.jsonl"}}, "needs the number of prompts, but: data.train: .*not"),
        ({"rollout": {"prompts_per_step": 31}}, "data.train: a step of 31 prompts cannot be drawn"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_counted_are_one_error(build_config, sections, message):
    data = {"epochs": 1} | sections.get("data", {})
    with pytest.raises(ConfigError, match=message):
        resolve_epochs(build_config(**sections | {"data": data}))
