"""Tests of prompt checks, whose errors come before those of vLLM."""

import pytest

from megatron_rl.engine.requests import check_prompts
from megatron_rl.types import Prompt


def _prompt(*tokens: int) -> Prompt:
    return Prompt(7, (), tokens, "", "test")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (_prompt(), "prompt 7 has 0 tokens"),
        (_prompt(1, 2, 3, 4), "takes 1 to 3"),
        (_prompt(1, 50), r"outside 0\.\.49"),
    ],
)
def test_check_prompts_names_invalid_prompt(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompts([_prompt(1, 49), prompt], vocab_size=50, longest=3)
