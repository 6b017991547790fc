"""Create two tasks of two turns and a model so small that RL improves it in minutes on two cores.

Both are impossible without the environment's answer: it contains a random digit, which the last
turn must repeat. Whoever does not use it is right in a tenth of the cases (the blind ceiling).

ask: the first turn is a question mark, and the environment answers with the digit.
lookup: the prompt names a key, the first turn calls the tool `lookup` with it, and the tool returns
the key's digit in the row's table; another key has another digit.

The model is a Qwen2 of about a hundred thousand parameters with its own tokenizer. It is fine-tuned
on conversations of both tasks: first correct ones, then ones in which the key and the digit are
mostly random. So it knows the form, and its answers are little better than blind; what RL has to
find is that using the environment pays.

The output folder contains `ask` and `lookup`, each with `train.parquet` and `heldout.parquet`, and
`model` in Hugging Face format; a second call with the same settings does nothing.

    python tools/make_tool_tasks.py --output .cache/tool_tasks
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from megatron_rl.apps.tasks.making import PORTABLE

DIGITS, KEYS = "0123456789", "abcdefghijklmnopqrstuvwxyz"
# Tokens are single characters and a few pieces of text.
CALL = ("<tool_call>\n", '{"name": "lookup", "arguments": {"key": "', '"}}', "\n</tool_call>")
PIECES = ["<|im_start|>", "<|im_end|>", "user", "assistant", "system", "tool", "Question ",
          "Look up ", *CALL, "\n", " ", "?", ".", *DIGITS, *KEYS]  # fmt: skip
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_TOKENS = 64


@dataclass(frozen=True)
class Settings:
    """Settings of the tasks; every field is a command line option."""

    seed: int = 1
    train: int = 1024  # prompts of each task
    heldout: int = 128
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    batch: int = 64  # conversations per update
    learning_rate: float = 3e-3
    updates: int = 400  # on correct conversations
    noisy_updates: int = 100  # on conversations that mostly ignore the environment
    used: float = 0.15  # probability that a symbol of these is copied, not random


class Conversation(NamedTuple):
    """One conversation: its prompt, then turns of the policy and what the environment answers."""

    prompt: str
    turn: str
    role: str  # of the environment's message
    observation: str
    answer: str


def ask(number: int, digit: str, *, answer: str) -> Conversation:
    """A conversation of the task `ask`."""
    return Conversation(f"Question {number:03d}.", "?", "user", digit, answer)


def lookup(key: str, called: str, digit: str, *, answer: str) -> Conversation:
    """A conversation of the task `lookup`: `called` is the key that the policy calls with."""
    call = called.join(("".join(CALL[:2]), "".join(CALL[2:])))
    return Conversation(f"Look up {key}.", call, "tool", digit, answer)


def draw_conversation(generator: random.Random, used: float) -> Conversation:
    """Draw a conversation; a symbol is copied with probability `used`, and random otherwise."""
    digit, key = generator.choice(DIGITS), generator.choice(KEYS)
    answer = digit if generator.random() < used else generator.choice(DIGITS)
    if generator.random() < 0.5:
        return ask(generator.randrange(1000), digit, answer=answer)
    called = key if generator.random() < used else generator.choice(KEYS)
    return lookup(key, called, digit, answer=answer)


def draw_rows(generator: random.Random, settings: Settings, task: str) -> list[dict]:
    """Draw distinct rows: prompt, answer, and for `lookup` the table that only the tool reads."""
    rows: dict[str, dict] = {}
    while len(rows) < settings.train + settings.heldout:
        table = {key: generator.choice(DIGITS) for key in KEYS}
        key, digit = generator.choice(KEYS), generator.choice(DIGITS)
        if task == "ask":
            one = ask(generator.randrange(1000), digit, answer=digit)
            row = {"question": one.prompt, "answer": digit, "table": "{}"}
        else:
            # Many rows have the same prompt and digit: only the table tells them apart, so it is
            # part of the identity of a row, as the number of the row in `question` would be.
            one = lookup(key, key, table[key], answer=table[key])
            row = {"question": one.prompt, "answer": table[key], "table": json.dumps(table)}
        rows[json.dumps(row)] = row
    return list(rows.values())
