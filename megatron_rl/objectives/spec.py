"""Specification of an objective: a choice on four axes, and optional terms.

Frozen, validated on construction, and free of tensors; `Objective` evaluates it. Positions: t
counts the valid decisions of a response from 1 to L.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.objectives.checked import Checked, NotNegative, Positive, check_number
from megatron_rl.objectives.optional_terms import KlPenalty, RolloutCorrection

Weight = Literal[
    "token", "prefix_mean", "prefix_product", "prefix_min",
    "sequence_mean", "sequence_product", "one",
]  # fmt: skip
Gradient = Literal["through_weight", "detached"]
Aggregation = Literal["response_mean", "token_mean", "response_sum", "token_sum"]
Scale = Literal["constant", "sqrt(L/t)", "t^p"]
Space = Literal["ratio", "log"]


@dataclass(frozen=True, kw_only=True)
class Bounds(Checked):
    """The interval in which a weight stays unchanged, at every position.

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
            raise UserError(
                f"low is {self.low}: 1 - low must not be below 0, because ratios never are; use "
                "None for no lower bound"
            )
        # L/t is at least 1, so 1 - low * h is never above 0 with either scale.
        if self.space == "ratio" and self.scale in ("constant", "sqrt(L/t)") and self.low == 1:
            raise UserError("low is 1: no ratio is below 1 - low = 0; use None for no lower bound")
        if (self.scale == "t^p") != (self.power is not None):
            raise UserError(
                f"power is {self.power} with scale {self.scale!r}: give a power with scale 't^p', "
                "and only then"
            )


@dataclass(frozen=True, kw_only=True)
class PpoClip(Bounds):
    """PPO's clip, min(r A, clip(r) A); with `dual` c and A < 0, max of that and c A.

    `dual` is a ratio c > 1 in ratio space; in log space the bound is exp(dual * h).
    """

    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None:
            check_number("dual", self.dual, ">", 1 if self.space == "ratio" else 0)


@dataclass(frozen=True, kw_only=True)
class HardGate(Bounds):
    """Zero outside the bounds, the unchanged weight inside.

    `sided` "both" rejects on either side; "advantage" rejects above the upper bound only where
    A > 0 and below the lower one only where A < 0, as PPO's clip does.
    """

    sided: Literal["both", "advantage"] = "both"


@dataclass(frozen=True, kw_only=True)
class Truncate(Bounds):
    """The weight clipped to the bounds; if detached, clipped tokens keep their gradient."""


@dataclass(frozen=True, kw_only=True)
class TvFilter(Checked):
    """Reject tokens that increase a response's total variation above `threshold`.

    TV_i = 1 / (2 L) * sum_t |rho_t - 1|; in a response above the threshold, tokens with
    A (rho_t - 1) > 0 are rejected and the others keep their weight.
    """

    threshold: NotNegative


@dataclass(frozen=True, kw_only=True)
class Taper(Checked):
    """The weight clipped to an interval of ratios that depends on the sign of the advantage.

    TOPR, arXiv 2503.14286, equation 7: [a+, b+] where A >= 0 and [a-, b-] where A < 0. The defaults
    are its equation 8: weight 1 where A >= 0, and the ratio, at most 1, where A < 0.
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
                raise UserError(f"{sign}_low {low} is above {sign}_high {high}")


@dataclass(frozen=True, kw_only=True)
class PrefixBudget(Checked):
    """Reject tokens that move further away once they, or their prefix, exceed a budget.

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
            raise UserError(f"floor is {self.floor}: weights fall from 1 to it, so it is <= 1")


@dataclass(frozen=True, kw_only=True)
class SecondMoment(Checked):
    """Reject the largest log-ratios until the others' mean square is at most `threshold`.

    M2PO, arXiv 2510.01161, algorithm 1: over the tokens of a whole minibatch that PPO's clip could
    touch, A > 0 with rho > 1 and A < 0 with rho < 1. `Objective.fit` makes it a gate.
    """

    threshold: Positive


@dataclass(frozen=True, kw_only=True)
class DivergenceGate(Checked):
    """Reject a token whose probability has moved too far in the direction of its advantage.

    DPPO, arXiv 2602.04879. With pi and beta the two policies' probabilities of the sampled token, D
    is |pi - beta| ("tv") or beta log(beta / pi) + (1 - beta) log((1 - beta) / (1 - pi)) ("kl").
    Rejected are A > 0 with pi > beta and D > high, and A < 0 with pi < beta and D > low.
    """

    divergence: Literal["tv", "kl"]
    low: NotNegative
    high: NotNegative


@dataclass(frozen=True, kw_only=True)
class SoftGate(Checked):
    """4 / tau sigmoid(tau (r - 1)), with a temperature tau for each sign of the advantage.

    SAPO, arXiv 2511.20347. Its derivative by log r is r at r = 1 and fades on both sides of it;
    that is the coefficient where the weight is detached. Nothing is rejected.
    """

    positive_temperature: Positive = 1.0
    negative_temperature: Positive = 1.05


@dataclass(frozen=True, kw_only=True)
class GammaKernel(Checked):
    """r^power exp(rate (1 - r)), with a power and a rate for each sign of the advantage.

    VESPO, arXiv 2602.10693: 1 at r = 1, 0 at r = 0 and at infinity. Nothing is rejected.
    """

    positive_power: Positive = 2.0
    positive_rate: Positive = 3.0
    negative_power: Positive = 3.0
    negative_rate: Positive = 2.0


@dataclass(frozen=True, kw_only=True)
class Unconstrained:
    """No constraint: the weight unchanged."""


Bounded = PpoClip | HardGate | Truncate
Constraint = (
    Bounded
    | TvFilter
    | Taper
    | PrefixBudget
    | SecondMoment
    | DivergenceGate
    | SoftGate
    | GammaKernel
    | Unconstrained
)
CONSTRAINTS: dict[str, type[Constraint]] = {
    "ppo_clip": PpoClip,
    "hard_gate": HardGate,
    "truncate": Truncate,
    "tv_filter": TvFilter,
    "taper": Taper,
    "prefix_budget": PrefixBudget,
    "second_moment": SecondMoment,
    "divergence_gate": DivergenceGate,
    "soft_gate": SoftGate,
    "gamma_kernel": GammaKernel,
    "none": Unconstrained,
}


@dataclass(frozen=True)
class ObjectiveSpec(Checked):
    """A policy objective: weight, constraint, gradient, aggregation, optional terms.

    `gradient` "detached" treats weight and gate as constants, sg[weight A] log pi; with
    "through_weight" the term is weight A itself. `negative` multiplies the terms of tokens with
    A < 0; 0 drops them. `balanced` computes that factor for each minibatch from `sign_noise`.
    `off_policy_mask` drops responses with A < 0 whose mean log-ratio is below minus this number.
    `constant` divides the aggregations `response_sum` and `token_sum` (Dr. GRPO's constant length,
    for example). Raises UserError for invalid combinations.
    """

    weight: Weight
    constraint: Constraint
    gradient: Gradient
    aggregation: Aggregation
    constant: Positive = 1.0
    negative: NotNegative = 1.0
    balanced: bool = False
    off_policy_mask: NotNegative | None = None
    kl: KlPenalty | None = None
    entropy_coefficient: NotNegative = 0.0
    rollout_correction: RolloutCorrection | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.constraint if isinstance(self.constraint, Bounds) else None
        if bounds and self.weight.startswith("sequence_") and bounds.scale != "constant":
            raise UserError(
                f"weight {self.weight!r} is the same at every position of a response, so bounds "
                f"with scale {bounds.scale!r} would keep or reject it by position alone: "
                "use scale 'constant', or a prefix weight"
            )
        dual = getattr(self.constraint, "dual", None)
        if bounds and bounds.low is None and bounds.high is None and dual is None:
            raise UserError(
                f"constraint {type(bounds).__name__} without a lower and an upper bound does "
                "nothing: use {kind: none}"
            )
        if self.weight == "prefix_min" and self.gradient == "through_weight":
            raise UserError(
                "weight 'prefix_min' cannot be differentiated: use gradient 'detached', as MinPRO "
                "does"
            )
        if self.weight == "one" and self.gradient == "through_weight":
            raise UserError("weight 'one' has no gradient: use gradient 'detached'")
        if self.balanced and self.negative != 1:
            raise UserError(
                f"negative is {self.negative} and balanced is true: both are the factor of wrong "
                "answers' terms, so give one"
            )
        if isinstance(self.constraint, GammaKernel) and self.gradient == "through_weight":
            raise UserError("constraint gamma_kernel is a coefficient: use gradient 'detached'")
        if isinstance(self.constraint, SecondMoment) and self.weight != "token":
            raise UserError(
                f"constraint second_moment is of the tokens' own ratios, but weight is "
                f"{self.weight!r}: use 'token'"
            )
        check_constant(self.constant, self.aggregation)

    @property
    def needs(self) -> dict[str, object]:
        """Required optional inputs, each with the option that needs it."""
        options = {
            "reference_logprobs": self.kl,
            "entropy": self.entropy_coefficient,
            "rollout_logprobs": self.rollout_correction,
        }
        return {name: option for name, option in options.items() if option}


def check_constant(constant: float, aggregation: Aggregation) -> None:
    """Raise UserError for a constant with an aggregation that is not a sum."""
    if constant != 1.0 and aggregation not in ("response_sum", "token_sum"):
        raise UserError(
            f"constant {constant} divides sums, but aggregation is {aggregation!r}: "
            "use response_sum or token_sum"
        )


@dataclass(frozen=True)
class OaplSpec(Checked):
    """The option of OAPL: beta of its log-ratio."""

    beta: Positive = 1.0

    @property
    def needs(self) -> dict[str, object]:
        """No optional inputs."""
        return {}
