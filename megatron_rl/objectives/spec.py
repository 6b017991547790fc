"""Specification of an objective: a choice on four axes and optional terms, or a user's own loss.

Frozen, validated on construction, and without torch; `Objective` and `FunctionObjective` evaluate
it. Positions: t counts the valid decisions of a response from 1 to L.
"""

import ast
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from megatron_rl.errors import UserError
from megatron_rl.types import Divergence

# Numbers with their constraints.
Positive = Annotated[float, ">", 0]
NotNegative = Annotated[float, ">=", 0]


class Checked:
    """A base class for dataclasses that checks each field: a literal, a number or a component."""

    def __post_init__(self) -> None:
        for name, declared in get_type_hints(type(self), include_extras=True).items():
            check(name, getattr(self, name), declared)


def check(name: str, value: object, declared: Any) -> None:
    """Raise UserError unless the value of a field matches its declared type."""
    kinds = get_args(declared) if type(None) in get_args(declared) else (declared,)
    if value is None and type(None) in kinds:
        return
    kind = kinds[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise UserError(f"{name} is {value!r}: choose one of {choices}")
    elif kind is float or get_origin(kind) is Annotated:
        check_number(name, value, *getattr(kind, "__metadata__", (">=", -math.inf)))
    elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
        raise UserError(f"{name} is {value!r}: it must be of type {names}")


def check_number(name: str, value: object, relation: str, minimum: float) -> None:
    """Raise UserError unless `value` is a finite number in the given relation to `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}: it must be a finite number")
    if value < minimum or (relation == ">" and value == minimum):
        raise UserError(f"{name} is {value}: it must be {relation} {minimum}")


@dataclass(frozen=True, kw_only=True)
class KlPenalty(Checked):
    """KL penalty: coefficient * rho_t * k_t added to the loss, differentiated in both factors.

    With q = pi_ref / pi_theta of the sampled token: k1 = -log q, k2 = (log q)^2 / 2,
    k3 = q - 1 - log q (http://joschu.net/blog/kl-approx.html). rho_t makes the expectation one
    over the policy's own action, so that k1 and k3 have the gradient of KL(pi_theta || pi_ref).

    The other three are sums over the whole vocabulary instead, without rho_t: KL(pi_theta ||
    pi_ref), KL(pi_ref || pi_theta) and their Jensen-Shannon divergence, each at the prefixes that
    the behavior policy generated (generalized knowledge distillation, arXiv 2306.13649). With
    `weighted`, each is multiplied by the objective's weight and gate of the prefix before its
    token, as constants (`constraints.prior_weight`).

    With `top_k` they compare the reference's K likeliest tokens, and all other tokens as one token.

    "advantage" is no term of its own: coefficient * log q of the sampled token, a constant, is
    added to the advantage, so that the objective's weight, gate and gradient apply to it.
    """

    coefficient: Positive
    estimator: Literal[
        "k1", "k2", "k3", "reverse_kl", "forward_kl", "jsd", "advantage"
    ] = "k3"  # fmt: skip
    weighted: bool = False
    top_k: int | None = None  # of the reference's tokens, the others as one bucket; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k is not None and (self.top_k < 1 or self.divergence is None):
            raise UserError(
                f"kl.top_k is {self.top_k} with estimator {self.estimator!r}: it is a number of "
                "tokens, 1 or more, of reverse_kl, forward_kl or jsd"
            )
        if self.weighted and self.divergence is None:
            raise UserError(
                f"kl.weighted with estimator {self.estimator!r}, which has a weight already: use "
                "reverse_kl, forward_kl or jsd, or unset kl.weighted"
            )

    @property
    def divergence(self) -> Divergence | None:
        """The divergence over the whole vocabulary; None for an estimate from sampled tokens."""
        whole = ("reverse_kl", "forward_kl", "jsd")
        return cast(Divergence, self.estimator) if self.estimator in whole else None

    @property
    def is_advantage(self) -> bool:
        """True if the reference's log-probs are added to the advantages."""
        return self.estimator == "advantage"


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection(Checked):
    """A constant factor for the mismatch between recomputed and engine log-probabilities.

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
            raise UserError(f"low {self.low} is not below high {self.high}")


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

    TV_i = 1 / (2 L) * sum_t |rho_t - 1|; in a response above the threshold, tokens with A (rho_t -
    1) > 0 are rejected and all other tokens keep their weight.
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

    @property
    def keeps_one(self) -> bool:
        """True if a weight of 1 stays, whatever the advantage."""
        return (
            self.positive_low <= 1 <= self.positive_high
            and self.negative_low <= 1 <= self.negative_high
        )


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
    """Reject the largest log-ratios until the mean square of the rest is at most `threshold`.

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

    SAPO, arXiv 2511.20347. Its derivative by log r equals 1 at r = 1 and tends to 0 on both sides;
    with `gradient: detached` it is the token's coefficient. Nothing is rejected.
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
    `advantage_coefficient` multiplies the policy term; with 0 only `kl` and `entropy_coefficient`
    remain. `constant` divides the aggregations `response_sum` and `token_sum` (Dr. GRPO's constant
    length, for example). Raises UserError for invalid combinations.
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
    advantage_coefficient: NotNegative = 1.0
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
        if self.weight == "one":
            self._check_weight_one()
        if self.balanced and self.negative != 1:
            raise UserError(
                f"negative is {self.negative} and balanced is true: both are the factor of wrong "
                "answers' terms, so give one"
            )
        if self.negative == 0 and self.off_policy_mask is not None:
            raise UserError(
                f"off_policy_mask is {self.off_policy_mask} and negative is 0: the mask drops "
                "wrong answers, of which no term is left, so unset one"
            )
        if isinstance(self.constraint, GammaKernel) and self.gradient == "through_weight":
            raise UserError("constraint gamma_kernel is a coefficient: use gradient 'detached'")
        if isinstance(self.constraint, SecondMoment) and self.weight != "token":
            raise UserError(
                f"constraint second_moment is of the tokens' own ratios, but weight is "
                f"{self.weight!r}: use 'token'"
            )
        if not self.advantage_coefficient and self.kl is None and not self.entropy_coefficient:
            raise UserError(
                "advantage_coefficient is 0 without kl and entropy_coefficient, so nothing would "
                "be trained: set kl, with the teacher as model.reference"
            )
        check_constant(self.constant, self.aggregation)
        self._check_teacher()

    def _check_weight_one(self) -> None:
        """Raise UserError for what has no effect on a weight of 1."""
        if self.gradient == "through_weight":
            raise UserError("weight 'one' has no gradient: use gradient 'detached'")
        constraint = self.constraint
        is_idle = isinstance(constraint, Bounds | SoftGate | GammaKernel) or (
            isinstance(constraint, Taper) and constraint.keeps_one
        )
        if is_idle:
            kind = next(k for k, v in CONSTRAINTS.items() if v is type(constraint))
            raise UserError(
                f"constraint {kind!r} has no effect on weight 'one', which never moves: use "
                "{kind: none}, a constraint of the ratios (tv_filter, prefix_budget, "
                "divergence_gate), or another weight"
            )

    def _check_teacher(self) -> None:
        """Raise UserError for a KL term that the weight or the constraint cannot weight."""
        of_prefix = self.weight in ("prefix_mean", "prefix_product")
        constraint = self.constraint
        if self.kl is not None and self.kl.weighted and not (of_prefix and self.is_unsigned):
            kind = next(k for k, v in CONSTRAINTS.items() if v is type(constraint))
            raise UserError(
                f"kl.weighted with weight {self.weight!r} and constraint {kind!r}: a divergence is "
                "weighted by the prefix before its token, and has no sign; use weight prefix_mean "
                "or prefix_product with hard_gate (sided both), truncate or none, as pnpo has"
            )
        fitted = self.balanced or isinstance(constraint, SecondMoment)
        if self.kl is not None and self.kl.is_advantage and fitted:
            raise UserError(
                "kl.estimator 'advantage' with balanced or second_moment, which are decided before "
                "an update, from the rewards' advantages alone: choose another constraint"
            )

    @property
    def is_unsigned(self) -> bool:
        """True if the constraint treats positive and negative advantages alike."""
        constraint = self.constraint
        return isinstance(constraint, Truncate | Unconstrained) or (
            isinstance(constraint, HardGate) and constraint.sided == "both"
        )

    @property
    def needs(self) -> dict[str, object]:
        """Optional inputs this objective requires, mapped to the option that requires them."""
        exact = self.kl is not None and self.kl.divergence is not None
        options = {
            "divergence" if exact else "reference_logprobs": self.kl,
            "entropy": self.entropy_coefficient,
            "rollout_logprobs": self.rollout_correction,
        }
        return {name: option for name, option in options.items() if option}


def needs_reference(needs: Mapping[str, object]) -> bool:
    """Return True if an objective with these needs compares the policy with the reference."""
    return "reference_logprobs" in needs or "divergence" in needs


def uses_advantages(spec: object) -> bool:
    """Return True if an objective has a term that is proportional to the advantage of a token."""
    if isinstance(spec, ObjectiveSpec):
        return spec.advantage_coefficient > 0
    return isinstance(spec, FunctionSpec)


def distills_alone(spec: object) -> bool:
    """Return True if an objective has its divergence and entropy, and no term of advantages."""
    return isinstance(spec, ObjectiveSpec) and not spec.advantage_coefficient


def can_reject(spec: object) -> bool:
    """Return True if an objective can reject tokens, which `gate/acceptance` counts."""
    if not isinstance(spec, ObjectiveSpec):
        return False
    is_soft = isinstance(spec.constraint, Unconstrained | SoftGate | GammaKernel)
    return not is_soft or spec.off_policy_mask is not None or spec.negative == 0


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


FUNCTION = "function"  # the name of the objective whose loss is a user's own
INPUTS = ("rollout_logprobs", "entropy")  # what a function may take besides, which every run has
PARAMETERS = ("policy_logprobs", "behavior_logprobs", "advantages", "mask", "statistics")


@dataclass(frozen=True)
class FunctionSpec(Checked):
    """A user's own per-token loss, as `module:function`, and its aggregation."""

    function: str
    aggregation: Aggregation = "response_mean"
    constant: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, name = self.function.partition(":")
        if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
            raise UserError(
                f"function is {self.function!r}: it must be module:function, such as my_losses:loss"
            )
        check_constant(self.constant, self.aggregation)

    @property
    def needs(self) -> dict[str, object]:
        """The function's arguments after the five: `INPUTS`, or further values of each token."""
        return dict.fromkeys(check_function(self.function), f"objective.function={self.function}")

    @property
    def further(self) -> tuple[str, ...]:
        """Names of values that responses have from an engine or a file for this function alone."""
        return tuple(name for name in self.needs if name not in INPUTS)


def check_function(name: str) -> tuple[str, ...]:
    """Return the names of further values of each token that the source of `module:function` takes.

    Raises UserError unless it defines a function with the five arguments of `PARAMETERS` first.
    """
    module, _, function = name.partition(":")
    stem = Path(*module.split("."))
    files = [
        file
        for folder in ("", *sys.path)
        for file in (Path(folder, stem.with_suffix(".py")), Path(folder, stem, "__init__.py"))
        if file.is_file()
    ]
    if not files:
        raise UserError(
            f"objective.function={name}: there is no module {module}; start in the folder that "
            "contains it, or install it"
        )
    try:
        body = ast.parse(files[0].read_bytes()).body
    except SyntaxError as error:
        raise UserError(f"objective.function={name}: {files[0]}: {error}; correct it") from None
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    imported = any(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body)
    if function not in functions:
        if function in files[0].read_text(encoding="utf-8") and imported:
            return ()  # possibly imported from elsewhere, or decorated: importing it will show
        raise UserError(
            f"objective.function={name}: {files[0]} has no function {function}; it has "
            f"{', '.join(functions) or 'none'}"
        )
    arguments = functions[function]
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    count = len(names)
    if not arguments.vararg and count < len(PARAMETERS):
        raise UserError(
            f"objective.function={name} takes {count} arguments; it must take "
            f"{len(PARAMETERS)}: {', '.join(PARAMETERS)}"
        )
    return tuple(names[len(PARAMETERS) : count - len(arguments.defaults)])
