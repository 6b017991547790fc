"""A machine with four registers modulo 10 and loops; the trace is what it does.

`a0b2c7d1>ea+3;fb-1;gb?e;hc+a;` gives each register its value, then the program: label, register and
what is added to it (a digit or another register), or `gb?e`: if b is not 0, go on at e. The trace
holds a line for each instruction that is carried out: label, register, its new value; a jump is its
label and where it leads, `.` for the end of the program. How long it is depends on the counters.
"""

import random
from dataclasses import dataclass

from megatron_rl.tasks.trace import Pen

REGISTERS = "abcd"
LABELS = "efghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
END = "."
JUMP = "?"


@dataclass(frozen=True)
class Machine:
    """Registers' first values, and (register, sign, operand) by label."""

    values: tuple[int, ...]
    program: tuple[tuple[str, str, str], ...]

    @property
    def question(self) -> str:
        """Values and program."""
        values = "".join(
            f"{name}{value}" for name, value in zip(REGISTERS, self.values, strict=True)
        )
        lines = (
            f"{label}{''.join(one)};" for label, one in zip(LABELS, self.program, strict=False)
        )
        return f"{values}>{''.join(lines)}"

    def solve(self, pen: Pen) -> None:
        """New values and where jumps lead are decided."""
        values = dict(zip(REGISTERS, self.values, strict=True))
        labels = LABELS[: len(self.program)] + END
        label = labels[0]
        while label != END:
            register, sign, operand = self.program[labels.index(label)]
            following = labels[labels.index(label) + 1]
            if sign == JUMP:
                pen.write(label)
                label = pen.decide(operand if values[register] else following, among=labels)
            else:
                amount = values[operand] if operand in values else int(operand)
                wanted = (values[register] + (amount if sign == "+" else -amount)) % 10
                pen.write(label + register)
                values[register] = int(pen.decide(str(wanted), among=DIGITS))
                label = following


def draw(generator: random.Random, size: int) -> Machine:
    """A program of `size` instructions: loops with bodies of one or two, and single ones."""
    program: list[tuple[str, str, str]] = []
    values = [generator.randrange(10) for _ in REGISTERS]
    free = list(REGISTERS)
    counters: list[str] = []
    while len(program) < size:
        room = size - len(program)
        if room >= 3 and len(free) > 2 and generator.random() < 0.7:
            counter = free.pop(generator.randrange(len(free)))
            counters.append(counter)
            values[REGISTERS.index(counter)] = generator.randrange(1, 6)
            begin = LABELS[len(program)]
            for _ in range(min(generator.randint(1, 2), room - 2)):
                program.append(_add(generator, free))
            program += [(counter, "-", "1"), (counter, JUMP, begin)]
        else:
            program.append(_add(generator, free))
    return Machine(tuple(values), tuple(program))


def _add(generator: random.Random, registers: list[str]) -> tuple[str, str, str]:
    operand = generator.choice([*registers, *"123456789"])
    return generator.choice(registers), generator.choice("+-"), operand
