"""Each kind of problem, worked by hand and checked by an independent computation."""

import random
import re

import pytest

from research.tasks import insertion_sort, multiplication, register_machine
from research.tasks.insertion_sort import InsertionSort
from research.tasks.multiplication import Multiplication
from research.tasks.register_machine import Machine
from research.tasks.settings import KINDS
from research.tasks.tokens import PIECES
from research.tasks.worked_solution import (
    Noise,
    SelfCorrection,
    correct_answer,
    correct_solution,
    count_decisions,
    noisy_solution,
    verify_trace,
)


def test_insertion_sort_solution():
    problem = InsertionSort("7a3")
    assert problem.question == "7a3"
    assert correct_solution(problem) == "7>7|a>7a|3>37a"
    assert count_decisions(problem) == 6


def test_multiplication_solution():
    # 12 * 34 = 408: 2*4 = 8; 1*4 = 4, carry 0; 2*3 + 4 = 10; 1*3 + 0 + 1 = 4.
    problem = Multiplication(12, 34)
    assert correct_solution(problem) == "2*4+0+0=80,1*4+0+0=40,2*3+4+0=01,1*3+0+1=40,>0408"
    assert problem.question == "2*4+?+?=??,1*4+?+?=??,2*3+?+?=??,1*3+?+?=??,>????"


def test_register_machine_solution():
    # b counts 2, 1, 0; a grows by 3 in each turn: 0, 3, 6; then c = 7 + 6 = 13 -> 3.
    machine = Machine(
        (0, 2, 7, 1), (("a", "+", "3"), ("b", "-", "1"), ("b", "?", "e"), ("c", "+", "a"))
    )
    assert machine.question == "a0b2c7d1>ea+3;fb-1;gb?e;hc+a;"
    trace = "ea0+3a3fb2-1b1gb1?eea3+3a6fb1-1b0gb0?hhc7+a6c3"
    assert correct_solution(machine) == trace


def test_sorts_and_products_are_correct():
    generator = random.Random(1)
    for size in (3, 8, 20):
        problem = insertion_sort.draw(generator, size)
        assert correct_solution(problem).rpartition(">")[2] == "".join(sorted(problem.symbols))
        assert len(correct_solution(problem)) + 1 == size * (size + 7) // 2
    for size in (1, 2, 5, 10):
        product = multiplication.draw(generator, size)
        trace = correct_solution(product)
        assert int(trace.rpartition(">")[2]) == product.first * product.second
        assert len(trace) + 1 == 11 * size**2 + 2 * size + 2


def execute(question):
    """Execute a program in Python and return the final registers."""
    start, _, program = question.partition(">")
    state = {name: int(value) for name, value in re.findall(r"([a-d])(\d)", start)}
    lines = program.rstrip(";").split(";")
    index = 0
    while index < len(lines):
        _, register, sign, operand = lines[index]
        index += 1
        if sign == "?":
            if state[register]:
                index = next(n for n, line in enumerate(lines) if line[0] == operand)
            continue
        amount = state[operand] if operand in state else int(operand)
        state[register] = (state[register] + (amount if sign == "+" else -amount)) % 10
    return state


def test_machine_traces_match_execution_and_vary_in_length():
    generator = random.Random(2)
    lengths = []
    for _ in range(200):
        machine = register_machine.draw(generator, 8)
        trace = correct_solution(machine)
        last = dict(re.findall(r"([a-d])(\d)", machine.question.partition(">")[0]))
        last |= dict(re.findall(r"([a-d])(\d)", trace))
        assert {name: int(value) for name, value in last.items()} == execute(machine.question)
        lengths.append(len(trace))
    assert max(lengths) > 3 * min(lengths)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_tokenizable_and_noise_makes_it_wrong(name):
    generator, kind = random.Random(3), KINDS[name]
    for size in (kind.smallest, kind.easy, min(kind.largest, 12)):
        for _ in range(20):
            problem = kind.draw(generator, size)
            trace = correct_solution(problem)
            assert set(problem.question + trace) <= set(PIECES)
            assert ":" not in problem.question + trace and "~" not in trace
            assert noisy_solution(problem, Noise(0.0), generator) == trace
            noisy = noisy_solution(problem, Noise(1.0), generator)
            assert verify_trace(noisy, trace, "")[0] == 0.0
            assert len(noisy) <= 2 * len(trace) + 8
            twice = SelfCorrection(problem, kind.blank)
            corrected = noisy_solution(twice, Noise(0.5, corrected=1.0), generator)
            extra = 2 * corrected.count("~")
            assert len(corrected) == len(correct_solution(twice)) == len(trace) + extra
            assert verify_trace(corrected, trace, "")[0] == 1.0 and correct_answer(twice) == trace
            added = len(twice.question) - len(problem.question)
            assert added == (extra if kind.blank else 0)


def test_easy_problems_have_more_easy_terms_than_chance():
    generator = random.Random(4)
    for name, kind in KINDS.items():
        problem = kind.draw_easy(generator, kind.easy)
        assert type(problem) is type(kind.draw(generator, kind.easy)), name
        assert len(problem.question) > 0
    # A uniform share of the terms is 0: about (1 + 1/10) / 2 of all, and all in some sums.
    sums = [KINDS["running_sum"].draw_easy(generator, 16) for _ in range(400)]
    zeros = [sum(term == 0 for _, term in problem.rest) for problem in sums]
    assert 0.5 < sum(zeros) / (400 * 15) < 0.6
    assert {0, 15} <= set(zeros)
    plus = sum(sign == "+" for problem in sums for sign, _ in problem.rest)
    assert 0.7 < plus / (400 * 15) < 0.8
    machines = [KINDS["register_machine"].draw_easy(generator, 8) for _ in range(400)]
    additions = [line for machine in machines for line in machine.program if line[1] == "+"]
    assert 0.5 < sum(operand == "1" for _, _, operand in additions) / len(additions) < 0.75
    problem = KINDS["multiplication"].draw_easy(generator, 1)
    assert re.fullmatch(r"\d\*\d.*", correct_solution(problem))
