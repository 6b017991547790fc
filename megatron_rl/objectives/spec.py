"""What an objective is: a choice on four axes, and the optional terms beside it.

Frozen, validated on construction, and free of tensors; `Objective` evaluates it. Positions: t
counts valid decisions of a response from 1, L is how many there are.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

Weight = Literal[
    "token", "prefix_mean", "prefix_product", "prefix_min", "sequence_mean", "sequence_product"
]
Score = Literal["token", "path"]
Aggregation = Literal["response_mean", "token_mean", "response_sum", "token_sum"]
Scale = Literal["constant", "sqrt(L/t)", "t^p"]
Space = Literal["ratio", "log"]


def check_choice(name: str, value: object, allowed: object) -> None:
    """Raise ValueError unless `value` is one of a Literal's strings."""
    choices = get_args(allowed)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def check_number(name: str, value: float | None, *, minimum: float, strict: bool = False) -> None:
    """Raise ValueError unless `value` is None or a finite number above the minimum."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")
    if value < minimum or (strict and value == minimum):
        raise ValueError(f"{name} is {value}: it must be {'>' if strict else '>='} {minimum}")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The interval in which a weight is left alone, at every position.

    In ratio space [1 - low * h, 1 + high * h], in log space [exp(-low * h), exp(high * h)], both
    ends inclusive, with h = 1, sqrt(L/t) or t^p. None leaves a side unbounded.
    """

    low: float | None
    high: float | None
    space: Space = "ratio"
    scale: Scale = "constant"
    power: float | None = None  # p of t^p

    def __post_init__(self) -> None:
        check_choice("space", self.space, Space)
        check_choice("scale", self.scale, Scale)
        check_number("low", self.low, minimum=0)
        check_number("high", self.high, minimum=0)
        if self.space == "ratio" and self.scale == "constant" and (self.low or 0) > 1:
            raise ValueError(
                f"low is {self.low}: a ratio is never below 0, so 1 - low must not be either; "
                "use None for no lower bound"
            )
        if (self.scale == "t^p") != (self.power is not None):
            raise ValueError(
                f"power is {self.power} with scale {self.scale!r}: give a power with scale 't^p', "
                "and only then"
            )
        check_number("power", self.power, minimum=-math.inf)


@dataclass(frozen=True, kw_only=True)
class PpoClip(Bounds):
    """min(r A, clip(r) A); with `dual` c and A < 0, max(that, c A).

    `dual` is a ratio c > 1 in ratio space; in log space the bound is exp(dual * h).
    """

    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("dual", self.dual, minimum=1 if self.space == "ratio" else 0, strict=True)


@dataclass(frozen=True, kw_only=True)
class HardGate(Bounds):
    """Zero outside the bounds, the untouched weight inside.

    `sided` "both" rejects on either side; "advantage" rejects above the upper bound only where
    A > 0 and below the lower one only where A < 0, as PPO's clip does.
    """

    sided: Literal["both", "advantage"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sided", self.sided, Literal["both", "advantage"])


@dataclass(frozen=True, kw_only=True)
class Truncate(Bounds):
    """The weight moved to the nearer bound; the score keeps its gradient."""


@dataclass(frozen=True, kw_only=True)
class Unconstrained:
    """The weight as it is."""


Constraint = PpoClip | HardGate | Truncate | Unconstrained
CONSTRAINTS: dict[str, type[Constraint]] = {
    "ppo_clip": PpoClip,
    "hard_gate": HardGate,
    "truncate": Truncate,
    "none": Unconstrained,
}


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """A policy objective: weight, constraint, score, aggregation, optional terms.

    `constant` divides the two sums (Dr. GRPO's constant length, for one); it is a matter of those
    alone. Raises ValueError for combinations without meaning.
    """

    weight: Weight
    constraint: Constraint
    score: Score
    aggregation: Aggregation
    constant: float = 1.0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_choice("weight", self.weight, Weight)
        check_choice("score", self.score, Score)
        check_choice("aggregation", self.aggregation, Aggregation)
        check_number("constant", self.constant, minimum=0, strict=True)
        if not isinstance(self.constraint, Constraint):
            raise ValueError(f"constraint is {self.constraint!r}: choose one of {[*CONSTRAINTS]}")
        scale = self.constraint.scale if isinstance(self.constraint, Bounds) else "constant"
        if self.weight.startswith("sequence_") and scale != "constant":
            raise ValueError(
                f"weight {self.weight!r} is the same at every position of a response, so bounds "
                f"with scale {scale!r} would keep or reject it by position alone: "
                "use scale 'constant', or a prefix weight"
            )
        if self.constant != 1.0 and self.aggregation not in ("response_sum", "token_sum"):
            raise ValueError(
                f"constant {self.constant} divides sums, but aggregation is {self.aggregation!r}: "
                "use response_sum or token_sum"
            )
