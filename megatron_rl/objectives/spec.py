"""What an objective is: a choice on four axes, and the optional terms beside it.

Frozen, validated on construction, and free of tensors; `Objective` evaluates it. Positions: t
counts valid decisions of a response from 1, L is how many there are.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Weight = Literal[
    "token", "prefix_mean", "prefix_product", "prefix_min",
    "sequence_mean", "sequence_product", "one",
]  # fmt: skip
Gradient = Literal["through_weight", "detached"]
Aggregation = Literal["response_mean", "token_mean", "response_sum", "token_sum"]
Scale = Literal["constant", "sqrt(L/t)", "t^p"]
Space = Literal["ratio", "log"]


# Numbers and what they must be.
Positive = Annotated[float, ">", 0]
NotNegative = Annotated[float, ">=", 0]


class Checked:
    """A dataclass whose fields hold what they declare: one of the words, a number, a part."""

    def __post_init__(self) -> None:
        for name, declared in get_type_hints(type(self), include_extras=True).items():
            check(name, getattr(self, name), declared)


def check(name: str, value: object, declared: Any) -> None:
    """Raise ValueError unless a field's value is one of those that its type declares."""
    kinds = get_args(declared) if type(None) in get_args(declared) else (declared,)
    if value is None and type(None) in kinds:
        return
    kind = kinds[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise ValueError(f"{name} is {value!r}: choose one of {choices}")
    elif kind is float or get_origin(kind) is Annotated:
        check_number(name, value, *getattr(kind, "__metadata__", (">=", -math.inf)))
    elif not isinstance(value, kinds):
        raise ValueError(f"{name} is {value!r}: it must be of type {declared}")


def check_number(name: str, value: object, relation: str, minimum: float) -> None:
    """Raise ValueError unless `value` is a finite number above, or not below, the minimum."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")
    if value < minimum or (relation == ">" and value == minimum):
        raise ValueError(f"{name} is {value}: it must be {relation} {minimum}")


@dataclass(frozen=True, kw_only=True)
class Bounds(Checked):
    """The interval in which a weight is left alone, at every position.

    In ratio space [1 - low * h, 1 + high * h], in log space [exp(-low * h), exp(high * h)], both
    ends inclusive, with h = 1, sqrt(L/t) or t^p. None leaves a side unbounded.
    """

    low: NotNegative | None
    high: NotNegative | None
    space: Space = "ratio"
    scale: Scale = "constant"
    power: float | None = None  # p of t^p

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.space == "ratio" and self.scale != "t^p" and (self.low or 0) > 1:
            raise ValueError(
                f"low is {self.low}: a ratio is never below 0, so 1 - low must not be either; "
                "use None for no lower bound"
            )
        # L/t is at least 1, so neither scale ever brings 1 - low * h above 0.
        if self.space == "ratio" and self.scale in ("constant", "sqrt(L/t)") and self.low == 1:
            raise ValueError(
                "low is 1: 1 - low is 0 and no ratio is below that; use None for no lower bound"
            )
        if (self.scale == "t^p") != (self.power is not None):
            raise ValueError(
                f"power is {self.power} with scale {self.scale!r}: give a power with scale 't^p', "
                "and only then"
            )


@dataclass(frozen=True, kw_only=True)
class PpoClip(Bounds):
    """min(r A, clip(r) A); with `dual` c and A < 0, max(that, c A).

    `dual` is a ratio c > 1 in ratio space; in log space the bound is exp(dual * h).
    """

    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None:
            check_number("dual", self.dual, ">", 1 if self.space == "ratio" else 0)


@dataclass(frozen=True, kw_only=True)
class HardGate(Bounds):
    """Zero outside the bounds, the untouched weight inside.

    `sided` "both" rejects on either side; "advantage" rejects above the upper bound only where
    A > 0 and below the lower one only where A < 0, as PPO's clip does.
    """

    sided: Literal["both", "advantage"] = "both"


@dataclass(frozen=True, kw_only=True)
class Truncate(Bounds):
    """The weight moved to the nearer bound; detached, the score keeps its gradient there too."""


@dataclass(frozen=True, kw_only=True)
class TvFilter(Checked):
    """Where a response's total variation exceeds `threshold`, reject what would increase it.

    TV_i = 1 / (2 L) * sum_t |rho_t - 1|; in a response above the threshold the tokens with
    A (rho_t - 1) > 0 are rejected, the others keep their weight.
    """

    threshold: NotNegative


@dataclass(frozen=True, kw_only=True)
class Taper(Checked):
    """The weight moved into an interval of ratios that depends on the sign of the advantage.

    TOPR, arXiv 2503.14286, equation 7: [a+, b+] where A >= 0 and [a-, b-] where A < 0. The defaults
    are its equation 8: responses to be made likelier have weight 1 whatever their ratio, those to
    be made less likely their ratio, at most 1.
    """

    positive_low: NotNegative = 1.0
    positive_high: Positive = 1.0
    negative_low: NotNegative = 0.0
    negative_high: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for sign in ("positive", "negative"):
            low, high = getattr(self, f"{sign}_low"), getattr(self, f"{sign}_high")
            if low > high:
                raise ValueError(f"{sign}_low {low} is above {sign}_high {high}")


@dataclass(frozen=True, kw_only=True)
class PrefixBudget(Checked):
    """Reject what moves a token further away where it, or its prefix, has moved enough.

    CPPO, arXiv 2606.10968, equations 8 to 10. With D_t = |pi(y_t) - pi_beta(y_t)|, weights w_t that
    fall linearly from 1 to `floor` over the response, S_t = sum_{j<=t} w_j D_j and
    W_t = sum_{j<=t} w_j: a token with A (rho_t - 1) > 0 stays only where w_t D_t <= threshold and
    S_t <= threshold + average W_{t-1}.
    """

    threshold: Positive  # delta
    average: NotNegative  # delta_b
    floor: Positive = 1.0  # w_min

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor > 1:
            raise ValueError(f"floor is {self.floor}: weights fall from 1 to it, so it is <= 1")


@dataclass(frozen=True, kw_only=True)
class SecondMoment(Checked):
    """Reject the largest log-ratios until the others' mean square is at most `threshold`.

    M2PO, arXiv 2510.01161, algorithm 1: over the tokens of a whole minibatch that PPO's clip could
    touch, A > 0 with rho > 1 and A < 0 with rho < 1. `Objective.fit` makes it a gate.
    """

    threshold: Positive


@dataclass(frozen=True, kw_only=True)
class Unconstrained:
    """The weight as it is."""


Constraint = (
    PpoClip | HardGate | Truncate | TvFilter | Taper | PrefixBudget | SecondMoment | Unconstrained
)
CONSTRAINTS: dict[str, type[Constraint]] = {
    "ppo_clip": PpoClip,
    "hard_gate": HardGate,
    "truncate": Truncate,
    "tv_filter": TvFilter,
    "taper": Taper,
    "prefix_budget": PrefixBudget,
    "second_moment": SecondMoment,
    "none": Unconstrained,
}


@dataclass(frozen=True, kw_only=True)
class KlPenalty(Checked):
    """coefficient * rho_t * k_t added to the loss, differentiated through both factors.

    With q = pi_ref / pi_theta of the sampled token: k1 = -log q, k2 = (log q)^2 / 2,
    k3 = q - 1 - log q (http://joschu.net/blog/kl-approx.html). rho_t makes the expectation one
    over the policy's own action, so that k1 and k3 have the gradient of KL(pi_theta || pi_ref).
    """

    coefficient: Positive
    estimator: Literal["k1", "k2", "k3"] = "k3"


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection(Checked):
    """A constant factor for the gap between recomputed and engine log-probabilities.

    c = exp(behavior - rollout) of the token, of the whole response (its product) or of the
    response's geometric mean; "truncate" moves it into [low, high] (truncated importance
    sampling), "mask" replaces it by 0 outside (IcePop, arXiv 2510.18855).
    """

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: Positive | None = None
    high: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")


@dataclass(frozen=True)
class ObjectiveSpec(Checked):
    """A policy objective: weight, constraint, gradient, aggregation, optional terms.

    `gradient` "detached" takes weight and gate as constants, sg[weight A] log pi; with
    "through_weight" the term is weight A itself. `constant` divides the two sums (Dr. GRPO's
    constant length, for one); it is a matter of those alone. Raises ValueError for combinations
    without meaning.
    """

    weight: Weight
    constraint: Constraint
    gradient: Gradient
    aggregation: Aggregation
    constant: Positive = 1.0
    kl: KlPenalty | None = None
    entropy_coefficient: NotNegative = 0.0
    rollout_correction: RolloutCorrection | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.constraint if isinstance(self.constraint, Bounds) else None
        if bounds and self.weight.startswith("sequence_") and bounds.scale != "constant":
            raise ValueError(
                f"weight {self.weight!r} is the same at every position of a response, so bounds "
                f"with scale {bounds.scale!r} would keep or reject it by position alone: "
                "use scale 'constant', or a prefix weight"
            )
        dual = getattr(self.constraint, "dual", None)
        if bounds and bounds.low is None and bounds.high is None and dual is None:
            raise ValueError(
                f"constraint {type(bounds).__name__} without a lower and an upper bound does "
                "nothing: use {kind: none}"
            )
        if self.weight == "prefix_min" and self.gradient == "through_weight":
            raise ValueError(
                "weight 'prefix_min' cannot be differentiated: use gradient 'detached', as MinPRO "
                "does"
            )
        if self.weight == "one" and self.gradient == "through_weight":
            raise ValueError("weight 'one' has no gradient: use gradient 'detached'")
        if isinstance(self.constraint, SecondMoment) and self.weight != "token":
            raise ValueError(
                f"constraint second_moment is of the tokens' own ratios, but weight is "
                f"{self.weight!r}: use 'token'"
            )
        if self.constant != 1.0 and self.aggregation not in ("response_sum", "token_sum"):
            raise ValueError(
                f"constant {self.constant} divides sums, but aggregation is {self.aggregation!r}: "
                "use response_sum or token_sum"
            )

    @property
    def needs(self) -> dict[str, object]:
        """The optional inputs that an option needs, each with that option."""
        options = {
            "reference_logprobs": self.kl,
            "entropy": self.entropy_coefficient,
            "rollout_logprobs": self.rollout_correction,
        }
        return {name: option for name, option in options.items() if option}


@dataclass(frozen=True)
class OaplSpec(Checked):
    """The one choice of OAPL: beta of its log-ratio."""

    beta: Positive = 1.0

    @property
    def needs(self) -> dict[str, object]:
        """No optional inputs."""
        return {}
