"""Each kind of problem by hand, and against another way to the answer."""

import random
import re

import pytest

from megatron_rl.tasks import insertion_sort, multiplication, register_machine
from megatron_rl.tasks.insertion_sort import InsertionSort
from megatron_rl.tasks.multiplication import Multiplication
from megatron_rl.tasks.register_machine import Machine
from megatron_rl.tasks.settings import KINDS
from megatron_rl.tasks.tokens import PIECES
from megatron_rl.tasks.trace import (
    Noise,
    Twice,
    count_decisions,
    noisy_trace,
    right_answer,
    right_trace,
    verify_trace,
)


def test_insertion_sort_by_hand():
    problem = InsertionSort("7a3")
    assert problem.question == "7a3"
    assert right_trace(problem) == "7>7|a>7a|3>37a"
    assert count_decisions(problem) == 6


def test_long_multiplication_by_hand():
    # 12 * 34 = 408: 2*4 = 8; 1*4 = 4, carry 0; 2*3 + 4 = 10; 1*3 + 0 + 1 = 4.
    problem = Multiplication(12, 34)
    assert right_trace(problem) == "2*4+0+0=80,1*4+0+0=40,2*3+4+0=01,1*3+0+1=40,>0408"
    assert problem.question == "2*4+?+?=??,1*4+?+?=??,2*3+?+?=??,1*3+?+?=??,>????"


def test_a_machine_by_hand():
    # b counts 2, 1, 0; a grows by 3 in each turn: 0, 3, 6; then c = 7 + 6 = 13 -> 3.
    machine = Machine(
        (0, 2, 7, 1), (("a", "+", "3"), ("b", "-", "1"), ("b", "?", "e"), ("c", "+", "a"))
    )
    assert machine.question == "a0b2c7d1>ea+3;fb-1;gb?e;hc+a;"
    trace = "ea0+3a3fb2-1b1gb1?eea3+3a6fb1-1b0gb0?hhc7+a6c3"
    assert right_trace(machine) == trace


def test_sorts_and_products_are_right():
    generator = random.Random(1)
    for size in (3, 8, 20):
        problem = insertion_sort.draw(generator, size)
        assert right_trace(problem).rpartition(">")[2] == "".join(sorted(problem.symbols))
        assert len(right_trace(problem)) + 1 == size * (size + 7) // 2
    for size in (1, 2, 5, 10):
        product = multiplication.draw(generator, size)
        trace = right_trace(product)
        assert int(trace.rpartition(">")[2]) == product.first * product.second
        assert len(trace) + 1 == 11 * size**2 + 2 * size + 2


def execute(question):
    """The registers in the end, by Python."""
    start, _, program = question.partition(">")
    state = {name: int(value) for name, value in re.findall(r"([a-d])(\d)", start)}
    lines = program.rstrip(";").split(";")
    place = 0
    while place < len(lines):
        _, register, sign, operand = lines[place]
        place += 1
        if sign == "?":
            if state[register]:
                place = next(n for n, line in enumerate(lines) if line[0] == operand)
            continue
        amount = state[operand] if operand in state else int(operand)
        state[register] = (state[register] + (amount if sign == "+" else -amount)) % 10
    return state


def test_machines_end_as_python_says_and_their_lengths_vary():
    generator = random.Random(2)
    lengths = []
    for _ in range(200):
        machine = register_machine.draw(generator, 8)
        trace = right_trace(machine)
        last = dict(re.findall(r"([a-d])(\d)", machine.question.partition(">")[0]))
        last |= dict(re.findall(r"([a-d])(\d)", trace))
        assert {name: int(value) for name, value in last.items()} == execute(machine.question)
        lengths.append(len(trace))
    assert max(lengths) > 3 * min(lengths)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_written_in_tokens_and_noise_makes_it_wrong(name):
    generator, kind = random.Random(3), KINDS[name]
    for size in (kind.smallest, kind.easy, min(kind.largest, 12)):
        for _ in range(20):
            problem = kind.draw(generator, size)
            trace = right_trace(problem)
            assert set(problem.question + trace) <= set(PIECES)
            assert ":" not in problem.question + trace and "~" not in trace
            assert noisy_trace(problem, Noise(0.0), generator) == trace
            noisy = noisy_trace(problem, Noise(1.0), generator)
            assert verify_trace(noisy, trace, "")[0] == 0.0
            assert len(noisy) <= 2 * len(trace) + 8
            twice = Twice(problem, kind.blank)
            corrected = noisy_trace(twice, Noise(0.5, corrected=1.0), generator)
            longer = 2 * corrected.count("~")
            assert len(corrected) == len(right_trace(twice)) == len(trace) + longer
            assert verify_trace(corrected, trace, "")[0] == 1.0 and right_answer(twice) == trace
            added = len(twice.question) - len(problem.question)
            assert added == (longer if kind.blank else 0)


def test_easy_problems_are_problems_of_their_kind_and_some_of_them_easy():
    generator = random.Random(4)
    for name, kind in KINDS.items():
        problem = kind.draw_easy(generator, kind.easy)
        assert type(problem) is type(kind.draw(generator, kind.easy)), name
        assert len(problem.question) > 0
    # Any share of the terms beyond chance is 0: about (1 + 1/10) / 2 of all, and all in some sums.
    sums = [KINDS["running_sum"].draw_easy(generator, 16) for _ in range(400)]
    zeros = [sum(term == 0 for _, term in problem.rest) for problem in sums]
    assert 0.5 < sum(zeros) / (400 * 15) < 0.6
    assert {0, 15} <= set(zeros)
    plus = sum(sign == "+" for problem in sums for sign, _ in problem.rest)
    assert 0.7 < plus / (400 * 15) < 0.8
    machines = [KINDS["register_machine"].draw_easy(generator, 8) for _ in range(400)]
    counted = [one for machine in machines for one in machine.program if one[1] == "+"]
    assert 0.5 < sum(operand == "1" for _, _, operand in counted) / len(counted) < 0.75
    problem = KINDS["multiplication"].draw_easy(generator, 1)
    assert re.fullmatch(r"\d\*\d.*", right_trace(problem))
