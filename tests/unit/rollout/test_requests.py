"""Stop tokens, prompt checks: the errors a user sees before vLLM would raise its own."""

import json

import pytest

from megatron_rl.rollout.requests import check_prompts, stop_tokens
from megatron_rl.types import Prompt


def _prompt(*tokens: int) -> Prompt:
    return Prompt(7, (), tokens, "", "test")


def test_stop_tokens_are_those_of_both_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_tokens(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert stop_tokens(tmp_path) == (5, 2)


def test_a_model_without_an_end_of_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="eos_token_id"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (_prompt(), "prompt 7 has 0 tokens"),
        (_prompt(1, 2, 3, 4), "takes 1 to 3"),
        (_prompt(1, 50), r"outside 0\.\.49"),
    ],
)
def test_prompts_that_do_not_fit_are_named(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompts([_prompt(1, 49), prompt], vocab_size=50, longest=3)
