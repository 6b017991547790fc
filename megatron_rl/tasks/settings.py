"""What decides a made task: its problems, its noise, its model."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.tasks import insertion_sort, multiplication, register_machine, running_sum
from megatron_rl.tasks.trace import Problem


class Kind(NamedTuple):
    """A kind of problem; `size` is what it counts."""

    draw: Callable[[random.Random, int], Problem]
    smallest: int
    easy: int  # a size that a model learns soon; larger ones are begun with it
    largest: int
    size: str


KINDS = {
    "running_sum": Kind(running_sum.draw, 4, 16, 256, "terms"),
    "insertion_sort": Kind(insertion_sort.draw, 3, 8, 36, "symbols"),
    "multiplication": Kind(multiplication.draw, 1, 2, 10, "digits"),
    "register_machine": Kind(register_machine.draw, 3, 5, 20, "instructions"),
}


@dataclass(frozen=True)
class TaskSettings:
    """Every field is an option of `megatron-rl task`."""

    task: str
    size: int
    noise: Literal["early", "late", "even"] = "even"
    corrected: float = 0.0  # share of slips that the warm-up shows corrected
    success: float = 0.3  # wished of the warmed-up model, at temperature 1
    tolerance: float = 0.03
    seed: int = 1
    train: int = 4096  # prompts
    heldout: int = 256  # prompts, none of them in the training set
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    batch: int = 16  # traces per update of the warm-up; at least 8 where they are long
    learning_rate: float = 3e-3
    longest_warm_up: int = 3000  # updates on right traces

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise ValueError(f"task {self.task!r} is unknown; there are {', '.join(KINDS)}")
        kind = KINDS[self.task]
        if not kind.smallest <= self.size <= kind.largest:
            raise ValueError(
                f"size={self.size}: {self.task} takes {kind.smallest} to {kind.largest} {kind.size}"
            )
        for name in ("success", "tolerance", "corrected"):
            if not (0 <= getattr(self, name) < 1):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 < self.tolerance <= min(self.success, 1 - self.success):
            raise ValueError(
                f"success={self.success} +- tolerance={self.tolerance} must lie between 0 and 1"
            )
        if self.hidden % (32 * self.heads):  # vLLM's attention on CPU takes no smaller head
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of 32 * heads, with heads={self.heads}"
            )

    @property
    def kind(self) -> Kind:
        """What is drawn."""
        return KINDS[self.task]
