"""Register machine with four registers modulo 10 and loops; the solution is its execution trace.

`a0b2c7d1>ea+3;fb-1;gb?e;hc+a;` contains the registers' initial values, then the program. An
instruction is a label, a register and the operand to add (a digit or another register), or `gb?e`:
if b is not 0, jump to e. The trace has a line for each executed instruction, such as `hc7+a6c3`:
label, values read, new value of the register; `gb1?e` is a jump with its target, or `.` for the end
of the program. Every value follows its register's name, so that a register's value is at the name's
last occurrence. The trace length depends on the counters.
"""

import random
from dataclasses import dataclass

from research.tasks.worked_solution import SolutionWriter

REGISTERS = "abcd"
LABELS = "efghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
END = "."
JUMP = "?"


@dataclass(frozen=True)
class Machine:
    """Initial register values, and (register, sign, operand) by label."""

    values: tuple[int, ...]
    program: tuple[tuple[str, str, str], ...]

    @property
    def question(self) -> str:
        """Initial values and program."""
        values = "".join(
            f"{name}{value}" for name, value in zip(REGISTERS, self.values, strict=True)
        )
        lines = (
            f"{label}{''.join(instruction)};"
            for label, instruction in zip(LABELS, self.program, strict=False)
        )
        return f"{values}>{''.join(lines)}"

    def solve(self, writer: SolutionWriter) -> None:
        """Write the execution trace, deciding new values and jump targets."""
        values = dict(zip(REGISTERS, self.values, strict=True))
        labels = LABELS[: len(self.program)] + END
        label = labels[0]
        while label != END:
            register, sign, operand = self.program[labels.index(label)]
            following = labels[labels.index(label) + 1]
            if sign == JUMP:
                writer.write(f"{label}{register}{values[register]}{sign}")
                label = writer.decide(operand if values[register] else following, among=labels)
            else:
                amount = values[operand] if operand in values else int(operand)
                result = (values[register] + (amount if sign == "+" else -amount)) % 10
                read = f"{operand}{amount}" if operand in values else operand
                writer.write(f"{label}{register}{values[register]}{sign}{read}{register}")
                values[register] = int(writer.decide(str(result), among=DIGITS))
                label = following


def draw(generator: random.Random, size: int) -> Machine:
    """Draw a program of `size` instructions: single ones, and loops with one or two in the body."""
    return _draw(generator, size, ease=0.0)


def draw_easy(generator: random.Random, size: int) -> Machine:
    """Draw a program in which a random fraction of operands is 1 and of signs `+`."""
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
            target = LABELS[len(program)]
            for _ in range(min(generator.randint(1, 2), room - 2)):
                program.append(_add(generator, free, ease=ease))
            program += [(counter, "-", "1"), (counter, JUMP, target)]
        else:
            program.append(_add(generator, free, ease=ease))
    return Machine(tuple(values), tuple(program))


def _add(generator: random.Random, registers: list[str], *, ease: float) -> tuple[str, str, str]:
    return (
        generator.choice(registers),
        "+" if generator.random() < ease else generator.choice("+-"),
        "1" if generator.random() < ease else generator.choice([*registers, *"123456789"]),
    )
