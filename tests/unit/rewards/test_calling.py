"""Calls of verifiers by their signature, and the values that they may return."""

import json

import numpy as np
import pytest
import torch

from megatron_rl.rewards.verifier import NUMBER, Item
from megatron_rl.rewards.worker import Call, SignatureError, read_grade


def grade(verifier, *items):
    """The answers of calls with one item, or of one call if the verifier takes lists."""
    call = Call(verifier, name="my_rewards:score")
    if call.is_batched:
        return call.grade(items)
    return [answer if isinstance(answer := call.grade([item]), dict) else answer[0]
            for item in items]  # fmt: skip


ITEM = Item("so 7", "7", "set", json.dumps({"level": 3}))


@pytest.mark.parametrize(
    ("value", "reward"),
    [(0, 0.0), (True, 1.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
     (np.bool_(True), 1.0), (np.array(0.5), 0.5), (torch.tensor(0.25), 0.25)],
)  # fmt: skip
def test_number_is_reward(value, reward):
    grade_result = read_grade(value, name="r:f")
    assert grade_result == [reward, NUMBER, None]
    assert type(grade_result[0]) is float  # what JSON can carry
    assert read_grade((value, "why", "7"), name="r:f") == [reward, "why", "7"]


@pytest.mark.parametrize(
    "value",
    [None, (1.0, "right"), "1.0", float("nan"), float("inf"), np.ones(2),
     ("right", 1.0, None), (1.0, None, None), (1.0, "right", 7), object(), torch.ones(3),
     {}, {"format": "1"}, {"format": float("nan")}, {1: 1.0}, {"a b": 1.0}, {"shaped": 1.0}],
)  # fmt: skip
def test_invalid_reward_names_expected_types(value):
    with pytest.raises(TypeError) as error:
        read_grade(value, name="my_rewards:score")
    output = str(error.value)
    assert output.startswith("my_rewards:score returned " + repr(value)[:100])
    assert "return the reward, a finite number, or a tuple (reward, reason, answer)" in output


def test_named_rewards_replace_number():
    rewards = {"correct": np.float32(1), "format": 0.5}
    plain = {"correct": 1.0, "format": 0.5}
    grade_result = read_grade(rewards, name="r:f")
    assert grade_result == [plain, NUMBER, None]
    assert json.loads(json.dumps(grade_result))[0] == plain
    assert read_grade((rewards, "why", "7"), name="r:f") == [plain, "why", "7"]
    assert grade(lambda texts, truths, sources: [rewards] * 2, ITEM, ITEM) == [grade_result] * 2


def test_lone_surrogate_in_text_is_replaced():
    cut = json.loads('"7\\ud83d"')  # as json.loads of an answer that was cut inside an emoji
    grade_result = read_grade((1.0, cut, cut), name="r:f")
    assert grade_result == [1.0, "7?", "7?"]

    def broken(text, ground_truth, data_source):
        raise LookupError(cut)

    (answer,) = grade(broken, ITEM)
    assert answer["error"].encode().rstrip().endswith(b"LookupError: 7?")


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (lambda completions, **kwargs: 0, "signature of a reward of TRL (completions, kwargs)"),
        (lambda prompts, completions, answer: 0, "signature of a reward of TRL"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "reward of verl"),
        (lambda text: 0, "cannot be called with (text, ground_truth, data_source)"),
        (lambda texts: 0, "cannot be called with (texts, ground_truths, data_sources)"),
    ],
)
def test_another_signature_is_refused_before_any_response(verifier, message):
    with pytest.raises(SignatureError) as error:
        grade(verifier, ITEM)
    assert str(error.value).startswith("my_rewards:score")
    assert message in str(error.value) and "docs/rewards.md" in str(error.value)


def test_verifier_with_row_parameter_gets_row():
    def score(text, ground_truth, data_source, row):
        return row["level"], f"{text}|{ground_truth}|{data_source}", None

    assert grade(score, ITEM) == [[3.0, "so 7|7|set", None]]
    assert grade(lambda *item: len(item), ITEM) == [[3.0, NUMBER, None]]  # nobody else gets it


def test_verifier_with_texts_parameter_gets_lists():
    def score(texts, ground_truths, data_sources, rows):
        assert (ground_truths, data_sources) == (["7", "7"], ["set", "set"])
        return np.array([len(text) + row["level"] for text, row in zip(texts, rows, strict=True)])

    assert grade(score, ITEM, ITEM._replace(text="")) == [[7.0, NUMBER, None], [3.0, NUMBER, None]]
    for value in (1.0, [1.0], None):
        answer = grade(lambda texts, truths, sources, value=value: value, ITEM, ITEM)
        assert f"my_rewards:score returned {value!r} for 2 responses; return a list" in str(answer)


def test_async_verifier_keeps_its_loop_from_call_to_call():
    import asyncio

    loops = []

    async def score(text, ground_truth, data_source):
        loops.append(asyncio.get_running_loop())
        if text == "raise":
            raise TimeoutError("of its own client")
        return 1, "right", None

    answers = grade(score, *(Item(text, "", "") for text in ("a", "raise", "b")))
    assert answers[0] == answers[2] == [1.0, "right", None]
    assert "of its own client" in answers[1]["error"]
    assert loops[0] is loops[2]


def test_async_for_lists_and_objects_that_can_be_called():
    class Grader:
        async def __call__(self, texts, ground_truths, data_sources):
            return [float(len(text)) for text in texts]

    assert grade(Grader(), ITEM, ITEM) == [[4.0, NUMBER, None]] * 2
