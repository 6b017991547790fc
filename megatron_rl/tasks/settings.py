"""What decides a made task: its problems, its noise, its model."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.tasks import insertion_sort, multiplication, register_machine, running_sum
from megatron_rl.tasks.trace import Draw, draw_twice


class Kind(NamedTuple):
    """A kind of problem; `size` is what it counts."""

    draw: Draw
    draw_easy: Draw  # what a model is begun with
    smallest: int
    easy: int  # the size that it is begun with
    usual: int
    largest: int
    size: str
    layers: int  # that a model needs
    blank: str = ""  # in a question, where a decision goes
    fixed_distance: bool = False  # from a question to what is read of it in the trace


KINDS = {
    "running_sum": Kind(
        running_sum.draw, running_sum.draw_easy, 4, 16, 16, 256, "terms", 2, "?", True
    ),
    "insertion_sort": Kind(insertion_sort.draw, insertion_sort.draw, 3, 4, 8, 36, "symbols", 2),
    "multiplication": Kind(multiplication.draw, multiplication.draw, 1, 1, 2, 10, "digits", 2, "?"),
    "register_machine": Kind(
        register_machine.draw, register_machine.draw_easy, 3, 3, 3, 20, "instructions", 3
    ),
}


@dataclass(frozen=True)
class TaskSettings:
    """Every field is an option of `megatron-rl task`."""

    task: str
    size: int = 0  # 0: the usual one of the kind
    noise: Literal["early", "late", "even"] = "even"
    corrected: float = 0.0  # share of slips that the warm-up shows corrected
    success: float = 0.3  # wished of the warmed-up model, at temperature 1
    tolerance: float = 0.03
    seed: int = 1
    train: int = 4096  # prompts
    heldout: int = 256  # prompts, none of them in the training set
    hidden: int = 64
    layers: int = 0  # 0: as many as the kind needs
    heads: int = 2
    batch: int = 16  # traces per update of the warm-up; fewer where they are long
    learning_rate: float = 3e-3
    longest_warm_up: int = 3000  # updates of a stage on right traces, in one call

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise ValueError(f"task {self.task!r} is unknown; there are {', '.join(KINDS)}")
        kind = KINDS[self.task]
        object.__setattr__(self, "size", self.size or kind.usual)
        object.__setattr__(self, "layers", self.layers or kind.layers)
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
        kind = KINDS[self.task]
        if not self.corrected:
            return kind
        return kind._replace(
            draw=draw_twice(kind.draw, kind.blank), draw_easy=draw_twice(kind.draw_easy, kind.blank)
        )
