"""Settings of a generated task: its problems, noise and model."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.errors import UserError
from research.tasks import insertion_sort, multiplication, register_machine, running_sum
from research.tasks.worked_solution import Draw, with_self_correction


class Kind(NamedTuple):
    """Kind of problem; `size` names the unit of the problem size."""

    draw: Draw
    draw_easy: Draw  # for the first stage of fine-tuning
    smallest: int
    easy: int  # size of easy problems
    usual: int
    largest: int
    size: str
    layers: int  # default number of layers
    blank: str = ""  # placeholder of a decision in a question
    fixed_distance: bool = False  # between question symbols and their copies in the solution


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
    """Settings of a task; every field is an option of `megatron-rl task`."""

    task: str
    size: int = 0  # 0: the default of the kind
    noise: Literal["early", "late", "even"] = "even"
    corrected: float = 0.0  # fraction of errors that are corrected in the fine-tuning data
    success: float = 0.3  # target accuracy of the fine-tuned model, at temperature 1
    tolerance: float = 0.03  # maximum deviation from the target accuracy
    seed: int = 1
    train: int = 4096  # prompts
    heldout: int = 256  # prompts, disjoint from the training set
    hidden: int = 64
    layers: int = 0  # 0: the default of the kind
    heads: int = 2
    batch: int = 16  # solutions per update; fewer if they are long
    learning_rate: float = 3e-3
    longest_warm_up: int = 3000  # maximum updates per stage on correct solutions, in one call
    experts: int = 0  # per layer, of a Qwen3-MoE; 0: a dense Qwen2
    experts_per_token: int = 4  # together as wide as the dense model's MLP

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise UserError(f"task {self.task!r} is unknown; choose one of {', '.join(KINDS)}")
        kind = KINDS[self.task]
        object.__setattr__(self, "size", self.size or kind.usual)
        object.__setattr__(self, "layers", self.layers or kind.layers)
        if not kind.smallest <= self.size <= kind.largest:
            raise UserError(
                f"size={self.size}: {self.task} needs {kind.smallest} to {kind.largest} {kind.size}"
            )
        for name in ("success", "tolerance", "corrected"):
            if not (0 <= getattr(self, name) < 1):
                raise UserError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 < self.tolerance <= min(self.success, 1 - self.success):
            raise UserError(
                f"success={self.success} +- tolerance={self.tolerance} must lie between 0 and 1"
            )
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise UserError(
                f"experts_per_token={self.experts_per_token} must be at least 1 and at most "
                f"experts={self.experts}"
            )
        if self.hidden % (32 * self.heads):  # minimum head size of vLLM's CPU attention
            raise UserError(
                f"hidden={self.hidden} must be a multiple of 32 * heads, with heads={self.heads}"
            )

    @property
    def kind(self) -> Kind:
        """Kind of problem, with self-corrections if `corrected` is set."""
        kind = KINDS[self.task]
        if not self.corrected:
            return kind
        return kind._replace(
            draw=with_self_correction(kind.draw, kind.blank),
            draw_easy=with_self_correction(kind.draw_easy, kind.blank),
        )
