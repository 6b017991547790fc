"""Extraction of a response's answer, and its comparison with the ground truth."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_rl.rewards.math_answer import (
    CUT_BOX,
    can_be_right,
    extract_answer,
    verify_after_thinking,
    verify_anywhere,
    verify_math_answer,
)
from megatron_rl.rewards.thinking import CUT_THINKING
from megatron_rl.rewards.verifier import UNPARSABLE_TRUTH


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"first \boxed{3}, no: \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}} ends", r"\frac{1}{2}"),
        (r"\boxed{ x^{2^{3}} }", "x^{2^{3}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.} and }", r"\left\{ 1 \right."),  # an escaped brace opens none
        (r"\boxed{a \\}", r"a \\"),  # a line break, then a closing brace
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"{ unclosed \boxed{7}", "7"),
        (r"\boxed{7} and cut off: \boxed{8", None),  # the last answer is not known
        (r"\boxed{7} and cut off: \boxed{\frac{8}{9}", None),
        (r"\fbox{7}", "7"),
        (r"so \boxed 7.", "7."),
        (r"$\boxed7$", "7"),
        (r"\boxed \frac{1}{2}", r"\frac{1}{2}"),
        ("Put the answer in \\boxed.", None),
        (r"$x=\boxed{3}$, $y=\boxed{5}$", "x = 3, y = 5"),
        (r"\boxed{3} and \boxed{5}", "3, 5"),
        (r"\boxed{3},\ \boxed{5}\text{ and }\boxed{7}", "3, 5, 7"),
        (r"\boxed{7}, \boxed{7}", "7"),
        ("\\boxed{3}\n\\boxed{5}", "5"),  # a correction
        (r"\boxed{7} Answer: 8", "7"),  # a box wins over an answer line
        ("Answer: 3\nAnswer: 7", "7"),
        ("**Answer:** $7$.", "7"),
        ("answer : 1/2", "1/2"),
        ("The final Answer: $\\frac12$", r"\frac12"),
        ("**Answer: 7**", "7"),
        ("**Answer**: 7", "7"),
        ("Answer:\n34", "34"),
        ("Answer:\n\n**34**\n", "34"),
        ("Answer\uff1a12", "12"),
        ("答案\uff1a12", "12"),
        ("答案是12。", "12。"),
        ("The answer is: 12", "12"),
        ("**Respuesta:** 12", "12"),
        ("R\u00e9ponse : 12", "12"),
        ("Antwort: 12", "12"),
        ("La r\u00e9ponse finale est : 12", "12"),  # the adjective follows the noun
        ("**Respuesta final:** 12", "12"),
        ("Risposta corretta: 12\n", "12"),
        ("Ostateczna odpowiedź: 12", "12"),
        ("Jawaban akhir: 12", "12"),
        ("उत्तर: 12", "12"),
        ("ansvar: 12", None),
        ("C\u00e2u tr\u1ea3 l\u1eddi cu\u1ed1i c\u00f9ng: 12", "12"),
        ("\u041e\u0442\u0432\u0435\u0442 \u0442\u0430\u043a\u043e\u0432: 12", "12"),
        ("Answer (final): 12", "12"),
        ("\u041e\u0442\u0432\u0435\u0442: 12", "12"),
        ("\uc815\ub2f5: 12", "12"),
        ("\u7b54\u3048\uff1a12", "12"),
        ("Answer:\n$$\n12\n$$", "12"),
        ("**Answer:**\n\\[\n12\n\\]", "12"),
        ("Answer: 7<|return|>", "7"),
        ("so 72.\n#### 72", "72"),
        ("#### $1,234", "1,234"),
        ("Answer: 5\n#### Explanation", "5"),
        ("#### 2. Compute\nAnswer: 5", "5"),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        ("Answer:", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_extract_answer_from_response(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{" * 500_000, None),
        ("{" * 3_000_000 + "\\boxed{1}", "1"),
        ("Answer" * 500_000, None),
        ("\\boxed{1}, " * 500_000, "1"),
        ("<think>" * 500_000, None),
    ],
)
def test_extraction_takes_one_pass_over_whatever_is_written(text, answer):
    """Megabytes: two nested passes would take hours, and the limit of a test ends them."""
    assert extract_answer(text) == answer


def _pairs():
    by_kind = defaultdict(list)
    with (Path(__file__).parent / "math_answers.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            by_kind[row["kind"]].append((row["answer"], row["truth"], float(row["reward"])))
    return by_kind


PAIRS = _pairs()


@pytest.mark.parametrize("kind", PAIRS)
def test_answer_of_kind_has_reward(kind):
    wrong = [
        f"{answer!r} for {truth!r} is not {reward}"
        for answer, truth, reward in PAIRS[kind]
        if verify_math_answer(f"so \\boxed{{{answer}}}", truth, "")[0] != reward
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("truth", "right"),
    [
        ("12", True), (r"\frac12", True), ("(0, 3]", True), ("Paris", True), ("7 km/h", True),
        ('["7", "seven"]', True), ("['7', 'seven']", True), ("B", True), ("x = 5 #### 5", True),
        (r"\frac{1}{2", False), ("####", False), (" ", False), (r"5 \to 7", False),
    ],
)  # fmt: skip
def test_a_truth_is_asked_whether_an_answer_can_equal_it(truth, right):
    assert can_be_right(truth) == right


@pytest.mark.parametrize("written", ['["4", "7"]', "['4', '7']", "['7']", " [ '7' ]"])
def test_list_of_right_answers_is_read_however_it_was_written(written):
    assert verify_math_answer(r"\boxed{7}", written, "")[0] == 1
    assert verify_math_answer(r"\boxed{5}", written, "")[0] == 0


def test_pairs_have_right_and_wrong_answers_of_every_kind():
    assert sum(map(len, PAIRS.values())) > 1000
    assert all({reward for *_, reward in rows} == {0.0, 1.0} for rows in PAIRS.values())


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u2009", "\u3000", "\u2007", "\t", "\n"])
def test_unusual_spaces_separate_thousands(space):
    assert verify_math_answer(f"\\boxed{{10{space}000}}", "10000", "")[0] == 1.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>maybe \\boxed{5}</think>\n**Answer: 7**", "7"),
        ("<think>maybe \\boxed{5}?</think> Answer: 7", "7"),
        ("thought that the prompt opened, \\boxed{5}</think>\\boxed{7}", "7"),
        ("<think>\\boxed{5}</think>no: <think>\\boxed{6}</think>\\boxed{7}", "7"),
        ("[THINK]\\boxed{5}[/THINK]\\boxed{7}", "7"),
        ("◁think▷\\boxed{5}◁/think▷\\boxed{7}", "7"),
        ("<|channel|>analysis<|message|>\\boxed{5}<|end|><|start|>assistant<|channel|>final"
         "<|message|>Answer: 7<|return|>", "7"),
        ("analysisSo \\boxed{5}.assistantfinalAnswer: 7", "7"),
        ("no thinking: \\boxed{7}", "7"),
    ],
)  # fmt: skip
def test_only_the_text_after_thinking_counts(text, right):
    assert verify_math_answer(text, right, "")[0] == 1.0
    assert verify_math_answer(text, "5", "")[0] == 0.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<think>maybe \\boxed{5} or so, let me check", CUT_THINKING),
        ("<think>x</think> wait <think>\\boxed{5}", CUT_THINKING),
        ("<|channel|>analysis<|message|>\\boxed{5}", CUT_THINKING),
        ("analysisSo \\boxed{5}", CUT_THINKING),
        ("<think>maybe \\boxed{5}</think>\nI do not know.", "no answer"),
        ("first \\boxed{5} then \\boxed{7", CUT_BOX),
    ],
)
def test_cut_response_has_no_answer(text, reason):
    assert verify_math_answer(text, "5", "") == (0.0, reason, None)
    assert verify_anywhere(text, "5", "")[0] == 1.0


def test_thinking_that_the_prompt_opened_must_end():
    assert verify_after_thinking("maybe \\boxed{5}", "5", "") == (0.0, CUT_THINKING, None)
    assert verify_after_thinking("\\boxed{4}</think> \\boxed{5}", "5", "")[0] == 1.0
    assert verify_anywhere("so \\boxed{4}, I mean 5", "4", "")[:2] == (1.0, "same text")


def test_grade_has_reason():
    assert verify_math_answer("hm", "7", "set") == (0.0, "no answer", None)
    assert verify_math_answer(r"\boxed{8}", "7", "set") == (0.0, "wrong answer", "8")
    assert verify_math_answer(r"\boxed{7}", " 7 ", "set") == (1.0, "same text", "7")
    assert verify_math_answer(r"\boxed{72}", "48+24=72\n#### 72", "set")[1] == "same text"
    assert verify_math_answer(r"\boxed{7.0}", "7", "set") == (1.0, "equal", "7.0")
    assert verify_math_answer(r"\boxed{\text{}}", "7", "set")[1] == "answer not understood"
    reward, reason, _ = verify_math_answer("\\boxed{" + "1+" * 5000 + "1}", "5001", "set")
    assert (reward, reason) == (0.0, "answer too long")


@pytest.mark.parametrize("truth", ["", r"\text{}", r"\frac{1}{", "x^2+"])
def test_unreadable_ground_truth_has_its_own_reason(truth):
    """Only the very same text can be right for it."""
    assert verify_math_answer(r"\boxed{8}", truth, "set") == (0.0, UNPARSABLE_TRUTH, "8")
    assert verify_math_answer(r"\boxed{8}", "7", "set")[1] == "wrong answer"
