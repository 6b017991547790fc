"""Extraction of a response's answer, and its comparison with the ground truth."""

import time

import pytest

from megatron_rl.rewards.math_answer import extract_answer, verify_math_answer
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
        (r"\boxed{7} and cut off: \boxed{8", "7"),
        (r"\boxed{7} Answer: 8", "7"),  # a box wins over an answer line
        ("Answer: 3\nAnswer: 7", "7"),
        ("**Answer:** $7$.", "7"),
        ("answer : 1/2", "1/2"),
        ("The final Answer: $\\frac12$", r"\frac12"),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        ("Answer:", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_extract_answer_from_response(text, answer):
    assert extract_answer(text) == answer


def test_extraction_takes_one_pass_over_whatever_is_written():
    start = time.perf_counter()
    assert extract_answer("\\boxed{" * 50_000) is None
    assert extract_answer("{" * 200_000 + "\\boxed{1}") == "1"
    assert extract_answer("Answer" * 50_000) is None
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("7", "7", 1.0),
        ("007", "7", 1.0),
        ("8", "7", 0.0),
        ("-7", "7", 0.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("1/2", r"\frac12", 1.0),
        ("1 + x", "x + 1", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("(2, 1)", "(1,2)", 0.0),
        (r"\sqrt{18}", r"3\sqrt{2}", 1.0),
        ("1,000", "1000", 1.0),
        (r"12 \text{ cm}", "12", 1.0),
        ("x = 5", "5", 1.0),
        ("$34$", "34", 1.0),
        ("34", "$34$", 1.0),
        (r"\frac{1}{", "2", 0.0),
        ("\x00\ud800 nonsense", "2", 0.0),
    ],
)
def test_compare_answer_with_ground_truth(answer, truth, reward):
    assert verify_math_answer(f"so \\boxed{{{answer}}}", truth, "set")[0] == reward


def test_grade_has_reason():
    assert verify_math_answer("hm", "7", "set") == (0.0, "no answer", None)
    assert verify_math_answer(r"\boxed{8}", "7", "set") == (0.0, "wrong answer", "8")
    assert verify_math_answer(r"\boxed{7}", " 7 ", "set") == (1.0, "same text", "7")
    assert verify_math_answer(r"\boxed{7.0}", "7", "set") == (1.0, "equal", "7.0")
    assert verify_math_answer(r"\boxed{\text{}}", "7", "set")[1] == "answer not understood"
    reward, reason, _ = verify_math_answer("\\boxed{" + "1+" * 5000 + "1}", "5001", "set")
    assert (reward, reason) == (0.0, "answer too long")


@pytest.mark.parametrize("truth", ["", r"\text{}", r"\frac{1}{", "x^2+"])
def test_unreadable_ground_truth_has_its_own_reason(truth):
    """Only the very same text can be right for it."""
    assert verify_math_answer(r"\boxed{8}", truth, "set") == (0.0, UNPARSABLE_TRUTH, "8")
    assert verify_math_answer(r"\boxed{8}", "7", "set")[1] == "wrong answer"
