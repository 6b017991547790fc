"""Grades of conversations: by their environment, or by a verifier that gets all messages."""

import json

import numpy as np

from megatron_rl.rollouts.grading import with_conversation
from megatron_rl.types import Prompt, Response

PROMPT = Prompt(0, ({"role": "user", "content": "1+1?"},), (1,), "2", "s", '{"level": 3}')
TURNS = ({"role": "assistant", "content": "?"}, {"role": "user", "content": "go"},
         {"role": "assistant", "content": "2"})  # fmt: skip


def response(messages):
    return Response(0, 0, np.array([1], np.int32), np.zeros(1, np.float32), "2", "stop", 0,
                    messages=messages)  # fmt: skip


def test_verifier_gets_whole_conversation_in_row():
    row = json.loads(with_conversation(PROMPT, response(TURNS)))
    assert row == {"level": 3, "conversation": [*PROMPT.messages, *TURNS]}


def test_row_without_turns_is_unchanged():
    assert with_conversation(PROMPT, response(())) == PROMPT.row
