"""A machine with four registers modulo 10 and loops; the trace is what it does.

`a0b2c7d1>ea+3;fb-1;gb?e;hc+a;` gives each register its value, then the program: label, register and
what is added to it (a digit or another register), or `gb?e`: if b is not 0, go on at e. The trace
holds a line for each instruction that is carried out, such as `hc7+a6c3`: label, what is read, the
register's new value; a jump is `gb1?e` with where it leads, `.` for the end of the program. Every
value stands behind its register, so that what a register holds is found where its name came last.
How long a trace is depends on the counters.
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
                pen.write(f"{label}{register}{values[register]}{sign}")
                label = pen.decide(operand if values[register] else following, among=labels)
            else:
                amount = values[operand] if operand in values else int(operand)
                wanted = (values[register] + (amount if sign == "+" else -amount)) % 10
                read = f"{operand}{amount}" if operand in values else operand
                pen.write(f"{label}{register}{values[register]}{sign}{read}{register}")
                values[register] = int(pen.decide(str(wanted), among=DIGITS))
                label = following


def draw(generator: random.Random, size: int) -> Machine:
    """A program of `size` instructions: loops with bodies of one or two, and single ones."""
    return _draw(generator, size, ease=0.0)


def draw_easy(generator: random.Random, size: int) -> Machine:
    """Some operands are 1 and some signs `+` beyond chance: none of them, or all, or any share."""
    return _draw(generator, size, ease=generator.random())


def _draw(generator: random.Random, size: int, *, ease: float) -> Machine:
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
                program.append(_add(generator, free, ease=ease))
            program += [(counter, "-", "1"), (counter, JUMP, begin)]
        else:
            program.append(_add(generator, free, ease=ease))
    return Machine(tuple(values), tuple(program))


def _add(generator: random.Random, registers: list[str], *, ease: float) -> tuple[str, str, str]:
    return (
        generator.choice(registers),
        "+" if generator.random() < ease else generator.choice("+-"),
        "1" if generator.random() < ease else generator.choice([*registers, *"123456789"]),
    )
