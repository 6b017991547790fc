r"""Verdicts of the default verifier: equal answers in other words, wrong ones near right.

Each line: the ground truth, what a response boxes, and what it earns.
"""

import pytest

from megatron_rl.rewards.math_answer import verify_math_answer

RIGHT = [
    # whole numbers
    ("34", "34"), ("34", " 34 "), ("34", "34."), ("34", "+34"), ("34", "034"), ("34", "34.0"),
    ("34", "34.000"), ("1000", "1,000"), ("1234567", "1,234,567"), ("1000", r"1{,}000"),
    ("1000", r"1\,000"), ("1000", r"1,\!000"),
    ("-7", "-7"), ("-7", r"{-7}"), ("-7", "(-7)"), ("0", "-0"),
    ("34", "$34$"), ("34", r"\text{34}"), ("34", "x=34"), ("34", "x = 34"), ("34", r"n=34"),
    ("1024", "2^{10}"), ("120", "5!"), ("6", r"\binom{4}{2}"), ("12", r"3 \cdot 4"),
    ("12", r"3 \times 4"), ("5", r"\sqrt{25}"), ("3", r"\sqrt[3]{27}"), ("7", "|-7|"),
    # fractions and decimals
    ("1/2", "1/2"), ("1/2", r"\frac{1}{2}"), ("1/2", r"\frac12"), ("1/2", r"\dfrac{1}{2}"),
    ("1/2", r"\tfrac{1}{2}"), ("1/2", "0.5"), ("1/2", ".5"), ("1/2", "2/4"),
    ("1/2", r"\frac{2}{4}"),
    ("1/2", r"\frac{-1}{-2}"), (r"\frac{3}{4}", "0.75"), (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"-\frac{3}{4}", r"\frac{3}{-4}"), (r"-\frac{3}{4}", "-3/4"), ("0.25", r"\frac{1}{4}"),
    ("1.5", r"1\frac{1}{2}"), (r"\frac{7}{3}", r"2\frac{1}{3}"), ("3/7", r"\frac{6}{14}"),
    ("2.50", "2.5"), ("0.1", r"10^{-1}"), ("50", r"50\%"), ("50%", "50"), (r"50\%", "0.5"),
    # units and money
    ("12", r"12\text{ cm}"), ("12", r"12 \text{ cm}^2"), ("12", "12 cm"), ("12", r"\$12"),
    ("90", r"90^\circ"), ("90", r"90^{\circ}"), ("90", r"90\text{ degrees}"), ("5", "5 apples"),
    ("30", r"30\,\mathrm{km/h}"), ("18", r"18\text{ dollars}"),
    # roots, pi, powers, logarithms
    (r"\sqrt{2}", "2^{1/2}"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt{2}", r"\sqrt2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"2\pi", r"\pi \cdot 2"), (r"2\pi", r"2 \pi"),
    (r"\frac{\pi}{2}", r"\pi/2"), (r"\frac{\pi}{2}", r"0.5\pi"), (r"e^2", r"e^{2}"),
    (r"\ln 4", r"2\ln 2"), (r"\log_2 8", "3"), (r"3+2\sqrt{2}", r"2\sqrt{2}+3"),
    (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2"), (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}"),
    (r"10\sqrt{3}-5", r"-5+10\sqrt{3}"), (r"\sin 30^\circ", r"\sin 30^\circ"), ("i", "i"),
    ("1+2i", "2i+1"), ("3-4i", r"-4i+3"),
    # expressions
    ("x+1", "1+x"), ("x^2-1", "(x-1)(x+1)"), ("2x+2", "2(x+1)"), ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x}{2}", "x/2"), (r"\frac{x}{2}", r"\frac{1}{2}x"), ("2n-1", "-1+2n"), ("ab", "ba"),
    ("y=2x+3", "y=2x+3"), ("y=2x+3", "y = 3 + 2x"), (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    # sets, pairs, intervals
    (r"\{1,2,3\}", r"\{1,2,3\}"), (r"\{1,2,3\}", r"\{3,2,1\}"), (r"\{1,2\}", r"\{ 1, 2 \}"),
    (r"\{1,2\}", r"\left\{1,2\right\}"), ("1,2,3", "1, 2, 3"), ("1,2", "2,1"), ("(1,2)", "(1, 2)"),
    ("(1,2)", r"\left(1,2\right)"), (r"(\frac{1}{2},3)", "(0.5,3)"), ("[0,1]", "[0, 1]"),
    ("[0,1)", r"\left[0,1\right)"), (r"(-\infty,2)", r"(-\infty, 2)"),
    (r"(2,\infty)", r"(2,\infty)"),
    (r"[0,1]\cup[2,3]", r"[0,1] \cup [2,3]"), ("-2,5", "x=-2, x=5"), (r"\pm 3", "3,-3"),
    # words and letters
    ("A", "A"), ("A", r"\text{A}"), ("B", r"\textbf{B}"), (r"\text{yes}", r"\text{yes}"),
    ("Tuesday", r"\text{Tuesday}"), (r"\begin{pmatrix}1\\2\end{pmatrix}",
                                     r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]  # fmt: skip
WRONG = [
    ("34", "35"), ("34", "-34"), ("34", "3.4"), ("34", "340"), ("34", "34.1"), ("34", "33.999"),
    ("34", "43"), ("34", "3,4"), ("34", "34x"), ("34", "34, 35"), ("34", r"\frac{34}{2}"),
    ("1000", "1,00"), ("1000", "100"), ("1000", "10000"), ("1000", r"1\,001"),
    ("-7", "7"), ("7", "-7"), ("0", "1"),
    ("1/2", "1/3"), ("1/2", "2"), ("1/2", "-1/2"), ("1/2", "0.51"), ("1/2", r"\frac{2}{1}"),
    ("1/3", "0.3"), ("1/3", "0.33"), ("2/3", "0.67"), (r"\frac{3}{4}", r"\frac{4}{3}"),
    ("1.5", r"1\frac{1}{3}"), ("0.25", "0.025"), ("12", r"13\text{ cm}"), ("12", r"\$1.2"),
    ("90", r"9^\circ"), (r"\sqrt{2}", "2"), (r"\sqrt{2}", r"\sqrt{3}"), (r"\sqrt{2}", "1.4"),
    (r"\sqrt{8}", r"\sqrt{2}"), (r"2\pi", r"\pi"), (r"2\pi", "6.28"), (r"2\pi", r"\pi^2"),
    (r"3+2\sqrt{2}", r"3-2\sqrt{2}"), (r"3+2\sqrt{2}", r"2+3\sqrt{2}"), (r"e^2", "2e"),
    ("1+2i", "1-2i"), ("1+2i", "2+i"), ("x+1", "x-1"), ("x^2-1", "x^2+1"), ("x^2-1", "(x-1)^2"),
    ("2x+2", "2x+1"), (r"\frac{x}{2}", r"\frac{2}{x}"), ("y=2x+3", "y=3x+2"), ("y=2x+3", "y=2x-3"),
    (r"\{1,2,3\}", r"\{1,2\}"), (r"\{1,2,3\}", r"\{1,2,4\}"), (r"\{1,2\}", r"\{1,2,3\}"),
    ("(1,2)", "(2,1)"), ("(1,2)", "(1,3)"), ("(1,2)", "1"), ("(1,2)", "(1,2,3)"),
    ("[0,1]", "[0,2]"), ("[0,1]", "[1,0]"), (r"(-\infty,2)", r"(2,\infty)"),
    (r"[0,1]\cup[2,3]", "[0,3]"), ("-2,5", "-2"), ("-2,5", "2,-5"), ("1,2,3", "1,2"),
    ("A", "B"), ("A", r"\text{B}"), (r"\text{yes}", r"\text{no}"), ("Tuesday", "Thursday"),
    ("34", "thirty-five"), ("34", "?"), ("34", r"\infty"), ("34", "34 or 35"), ("5", "5 + 1"),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer"), RIGHT)
def test_equal_answers_are_right(truth, answer):
    assert verify_math_answer(f"\\boxed{{{answer}}}", truth, "")[0] == 1.0


@pytest.mark.parametrize(("truth", "answer"), WRONG)
def test_other_answers_are_wrong(truth, answer):
    assert verify_math_answer(f"\\boxed{{{answer}}}", truth, "")[0] == 0.0
