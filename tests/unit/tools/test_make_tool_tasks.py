"""The tool tasks: the form that the model learns is that of the environments and the template."""

import asyncio
import random

import pytest

from examples.pnpo.tool_tasks import Ask, Lookup
from tools.make_tool_tasks import (
    DIGITS,
    Settings,
    build_tokenizer,
    draw_conversation,
    draw_rows,
    look_up,
    split,
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_format_equals_chat_template(tokenizer):
    generator = random.Random(1)
    for _ in range(20):
        one = draw_conversation(generator, 0.5)
        messages = [("user", one.prompt), ("assistant", one.turn), (one.role, one.observation),
                    ("assistant", one.answer)]  # fmt: skip
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages], tokenize=False
        )
        parts = split(one)
        assert "".join(part for part, _ in parts) + "\n" == text
        # Cut where the policy's turns begin and end, the text has the same tokens as whole.
        ids = [
            token for part, _ in parts for token in tokenizer.encode(part, add_special_tokens=False)
        ]
        assert ids == tokenizer.encode(text, add_special_tokens=False)[:-1]
        assert tokenizer.decode(ids) + "\n" == text
        written = "".join(part for part, is_written in parts if is_written)
        assert written == f"{one.turn}<|im_end|>{one.answer}<|im_end|>"


@pytest.mark.parametrize(("task", "environment"), [("ask", Ask), ("lookup", Lookup)])
def test_environment_rewards_its_own_answer_and_no_other(task, environment):
    rows = draw_rows(random.Random(3), Settings(train=50, heldout=10), task)
    assert len(rows) == 60
    for row in rows:
        if task == "ask":
            turn = "?"
        else:
            key = row["question"][-2]
            turn = look_up(0, key, "", called=key, answer="").turn
        for answer in DIGITS:
            made = environment(row, 0)
            first = asyncio.run(made.step(turn))
            observed = first.observation if task == "ask" else first.observation[0]["content"]
            assert observed == row["answer"]
            assert not first.done
            last = asyncio.run(made.step(answer))
            assert (last.done, last.reward) == (True, float(answer == row["answer"]))


@pytest.mark.parametrize("task", ["ask", "lookup"])
def test_no_symbol_predicts_answer_better_than_chance(task):
    """No symbol of the prompt predicts the answer better than chance."""
    rows = draw_rows(random.Random(4), Settings(train=4000, heldout=0), task)
    for place in (9, 10, 11, -2):  # the number's digits, and the key or the last digit
        best = {}
        for row in rows:
            counts = best.setdefault(row["question"][place], dict.fromkeys(DIGITS, 0))
            counts[row["answer"]] += 1
        right = sum(max(counts.values()) for counts in best.values()) / len(rows)
        assert right < 0.16  # 0.1, and what choosing the best of ten counts after the fact adds
