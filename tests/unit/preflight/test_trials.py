"""Checks of an environment: settings against each other, then one answer in a worker process."""

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.preflight.trials import start_environment_trial, with_tools
from megatron_rl.types import Prompt
from tests.character_tokenizer import build_tokenizer

TALKING = "tests.functional.talking"


def config(environment, **sections):
    values = {
        "model": {"path": "m"},
        "data": {"train": "t", "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 32},
        "environment": {"name": f"{TALKING}:Digits", "max_context_tokens": 64} | environment,
    }
    for name, given in sections.items():
        values[name] = values.get(name, {}) | given if isinstance(given, dict) else given
    return parse_config(values)


def test_context_replaces_sum_of_prompt_and_response():
    assert config({}).max_model_tokens == config({}).max_packed_tokens == 64
    assert config({"max_rewrites": 2}).max_packed_tokens == 3 * 64
    assert config({}).environment.max_turn_tokens is None


@pytest.mark.parametrize(
    ("environment", "sections", "message"),
    [
        ({"max_context_tokens": 16}, {}, r"must be above data\.max_prompt_tokens=16"),
        ({"max_turn_tokens": 33}, {}, r"environment\.max_turn_tokens=33 is more than all turns"),
        (
            {"time_limit_seconds": 60},
            {"rollout": {"stall_seconds": 50}},
            r"environment\.time_limit_seconds=60: one answer may take longer than rollout\.stall",
        ),
        (
            {},
            {"lag": {"partial_rollouts": 8}},
            r"lag\.partial_rollouts cannot be combined with environment\.name",
        ),
        (
            {},
            {"offline": {"rollouts": "r"}},
            r"offline\.rollouts cannot be combined with environment\.name",
        ),
        (
            {"max_rewrites": 8},
            {},
            r"environment\.max_rewrites=8 must be below environment\.max_tur",
        ),
    ],
)
def test_settings_that_conflict_are_refused(environment, sections, message):
    with pytest.raises(ConfigError, match=message):
        config(environment, **sections)


def test_tools_become_argument_of_chat_template():
    tools = [{"type": "function"}]
    shown = with_tools(config({}), tools)
    assert shown.data.template_arguments == {"tools": tools}
    assert with_tools(config({}), []).data.template_arguments == {}
    assert with_tools(config({}, data={"template": "raw"}), tools).data.template_arguments == {}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (f"{TALKING}:Digits", "{}", None),
        (f"{TALKING}:Nothing", "{}", "has no function Nothing"),
        (f"{TALKING}:Refuses", "{}", "refuses rows like this"),
    ],
)
def test_environment_is_loaded_and_tested_on_row(name, row, message, tmp_path):
    tokenizer = build_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    settings = config({"name": name}, model={"path": str(tmp_path)})
    prompt = Prompt(0, ({"role": "user", "content": "1+1?"},), (1,), "2", "s", row)
    with start_environment_trial(settings) as trial:
        problems = trial.problems() or trial.try_on(prompt)
    if message is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"environment.name={name}: ") and message in problem
        assert "\n" not in problem
