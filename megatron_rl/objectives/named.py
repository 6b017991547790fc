"""Named objectives, each a frozen choice on the axes, with its source; needs no torch.

`EXPERIMENTAL` has the objectives that were not checked against the original paper or code; they are
used by name like all objectives. `choose_objective` turns the name and overrides of a config into a
specification.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from megatron_rl.errors import UserError
from megatron_rl.objectives.spec import (
    CONSTRAINTS,
    FUNCTION,
    Bounds,
    DivergenceGate,
    FunctionSpec,
    GammaKernel,
    HardGate,
    OaplSpec,
    ObjectiveSpec,
    PpoClip,
    PrefixBudget,
    RolloutCorrection,
    SecondMoment,
    SoftGate,
    Taper,
    Truncate,
    TvFilter,
    Unconstrained,
)

# Weight, constraint, gradient, aggregation.
# fmt: off
NAMED: dict[str, ObjectiveSpec] = {
    # 1/N sum_i 1/L_i sum_t sg[M_t w_t A] log pi_t,  w_t = exp(S_t / t),
    # M_t = 1{1 - 7e-4 sqrt(L/t) <= w_t <= 1 + 9.5e-4 sqrt(L/t)}
    "pnpo": ObjectiveSpec(
        "prefix_mean",
        HardGate(low=7e-4, high=9.5e-4, scale="sqrt(L/t)"),
        "detached", "response_mean",
        source="Prefix-Normalized Policy Optimization, arXiv 2608.01418, section 3",
    ),
    # The same with M_t = 0 only above the upper bound where A > 0, below the lower where A < 0
    "pnpo_one_sided": ObjectiveSpec(
        "prefix_mean",
        HardGate(low=7e-4, high=9.5e-4, scale="sqrt(L/t)", sided="advantage"),
        "detached", "response_mean",
        source="ours: PNPO, arXiv 2608.01418, with the sides of PPO's clip; not published",
    ),
    # 1/N sum_i min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A),  s = exp(S_L / L)
    "gspo": ObjectiveSpec(
        "sequence_mean", PpoClip(low=3e-4, high=4e-4), "through_weight", "response_mean",
        source="arXiv 2507.18071",
    ),
    # sum_t min(rho_t A, clip(rho_t, 0.8, 1.28) A) / sum_i L_i, at least 10 A where A < 0
    "grpo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28, dual=10.0), "through_weight", "token_mean",
        source="arXiv 2402.03300; bounds, dual clip and token mean of the PNPO paper's baseline",
    ),
    # sum_t min(rho_t A, clip(rho_t, 0.8, 1.2) A) / sum_i L_i
    "ppo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.2), "through_weight", "token_mean",
        source="arXiv 1707.06347, equation 7",
    ),
    # PPO with clip-higher and token mean: the loss alone, no dynamic sampling, no overlong shaping
    "dapo": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28), "through_weight", "token_mean",
        source="arXiv 2503.14476, equation 8, the loss alone; the mean is over the minibatch's "
        "tokens, there over those of a prompt's group",
    ),
    # C_t = exp(S_t) clipped to [exp(-0.025 sqrt(t)), exp(0.05 sqrt(t))] by the sign of A
    "ctpo": ObjectiveSpec(
        "prefix_product",
        PpoClip(low=0.025, high=0.05, dual=0.05, space="log", scale="t^p", power=0.5),
        "detached", "response_mean",
        source="arXiv 2605.07331; weight, bounds and dual clip checked against its public code "
        "(horizon-llm/CTPO, loss cum-token-cumprod-la), whose launch script leaves verl's "
        "aggregation, a token mean",
    ),
    # w_t = exp(S_t / t) clipped to [exp(-0.025 / sqrt(t)), exp(0.05 / sqrt(t))]
    "ctpo_geomean": ObjectiveSpec(
        "prefix_mean",
        PpoClip(low=0.025, high=0.05, dual=0.05, space="log", scale="t^p", power=-0.5),
        "detached", "response_mean",
        source="public code of arXiv 2605.07331 (horizon-llm/CTPO, loss cum-token-geomean-la); "
        "aggregation ours, its launch script leaves verl's token mean",
    ),
    # 1/N sum_i sum_t rho_t A: the occupancy of the behavior policy
    "local_surrogate": ObjectiveSpec(
        "token", Unconstrained(), "through_weight", "response_sum",
        source="arXiv 1502.05477, the surrogate inside the trust region",
    ),
    # 1/N sum_i sum_t C_t A^beta_t, whose gradient is C_t A^beta_t sum_{k<=t} z_k
    "exact_prefix_score": ObjectiveSpec(
        "prefix_product", Unconstrained(), "through_weight", "response_sum",
        source="arXiv 2608.01418, appendix B: the gradient of the performance difference",
    ),
    # 1/N sum_i sum_t sg[C_t A^theta_t] log pi_t
    "exact_token_score": ObjectiveSpec(
        "prefix_product", Unconstrained(), "detached", "response_sum",
        source="arXiv 2608.01418, appendix B: the policy gradient under a change of measure",
    ),
    # sg[min(rho_t, 5) A] log pi_t: every token keeps its gradient
    "cispo": ObjectiveSpec(
        "token", Truncate(low=None, high=4.0), "detached", "token_mean",
        source="arXiv 2506.13585, equations 4 and 5; the cap of 5 is that of arXiv 2510.13786; the "
        "mean is over the minibatch's tokens, there over those of a prompt's group",
    ),
    # M_t rho_t A, M_t = 0 for the largest (log rho_t)^2 of tokens with A (rho_t - 1) > 0, until the
    # mean of the others, over the minibatch, is at most 0.04
    "m2po": ObjectiveSpec(
        "token", SecondMoment(threshold=0.04), "through_weight", "token_mean",
        source="arXiv 2510.01161, algorithm 1 and equation 5, over the whole minibatch; its public "
        "code (Infini-AI-Lab/M2PO) takes each micro-batch for itself and counts what it masks at "
        "its bound",
    ),
    # M_t rho_t A, M_t = 0 where A (rho_t - 1) > 0 and a token or its prefix moved too far
    "cppo": ObjectiveSpec(
        "token", PrefixBudget(threshold=0.15, average=0.015, floor=0.8), "through_weight",
        "token_mean",
        source="arXiv 2606.10968, equations 8 to 11, with the sampled token's |pi - pi_beta| for "
        "the total variation (its 'Binary' ablation; its runs take the 20 likeliest tokens) and a "
        "fixed budget (its runs from base models adapt it per response); token mean as its stack",
    ),
    # 1/N sum_i sum_t sg[A] log pi_t where A >= 0, sg[min(C_L, 1) A] log pi_t where A < 0
    "topr": ObjectiveSpec(
        "sequence_product", Taper(), "detached", "response_sum",
        source="arXiv 2503.14286, equation 8 and algorithm 1; there the sign is that of a reward "
        "minus a constant baseline: advantage.estimator: raw",
    ),
    # 1/N sum_i sum_t A log pi_t: no importance weight
    "asymre": ObjectiveSpec(
        "one", Unconstrained(), "detached", "response_sum",
        source="arXiv 2506.20520: A = R - V; with V the group's mean - 0.1, as in its experiments "
        "and in public code (Trinity-RFT): advantage.shift: -0.1, std: none",
    ),
    # sum_i sum_t A log pi_t / sum_i L_i, with A = 1 of a given answer
    "sft": ObjectiveSpec(
        "one", Unconstrained(), "detached", "token_mean",
        source="cross entropy of the tokens of given answers, for supervised fine-tuning (sft)",
    ),
    # 1/N sum_i 1/L_i sum_t 1{A > 0} A log pi_t
    "positive_only": ObjectiveSpec(
        "one", Unconstrained(), "detached", "response_mean", negative=0.0,
        source="RAFT, arXiv 2304.06767 and 2504.11343: responses above their group's mean alone, "
        "here weighted by A",
    ),
    # The same with 0.1 A where A < 0
    "damped_negatives": ObjectiveSpec(
        "one", Unconstrained(), "detached", "response_mean", negative=0.1,
        source="ours; weighting the two signs apart is from arXiv 2506.01347, where 0.1 is that of "
        "the positive ones (W-REINFORCE)",
    ),
    # 1/N sum_i 1/L_i sum_t sg[m s c(A) A] log pi_t,  m = 0 where A < 0 and s < 1 - 3e-4,
    # c(A < 0) = min(1, sqrt(sum_{A>0} A^2 (1 - beta)^2 / sum_{A<0} A^2 (1 - beta)^2))
    "balanced": ObjectiveSpec(
        "sequence_mean", HardGate(low=3e-4, high=None, sided="advantage"), "detached",
        "response_mean", balanced=True,
        source="ours, not published: GSPO's weight, arXiv 2507.18071, and its lower bound alone; "
        "wrong answers' terms damped to the gradient noise of right ones'",
    ),
    # The same with w_t = exp(S_t / t) and PNPO's lower bound
    "balanced_prefix": ObjectiveSpec(
        "prefix_mean", HardGate(low=7e-4, high=None, scale="sqrt(L/t)", sided="advantage"),
        "detached", "response_mean", balanced=True,
        source="ours, not published: the same with PNPO's weight, arXiv 2608.01418",
    ),
    # M_t rho_t A, M_t = 0 where |pi - beta| > 0.15 and A (rho_t - 1) > 0
    "dppo_tv": ObjectiveSpec(
        "token", DivergenceGate(divergence="tv", low=0.15, high=0.15), "through_weight",
        "token_mean",
        source="arXiv 2602.04879, Binary-TV; bounds of its example in verl, whose script divides "
        "by a constant length; prime-rl's default loss has 0.2, a token mean and adds "
        "1e-3 (log rho_t)^2. All three take the engine's log-probabilities: behavior: engine",
    ),
    # The same with the Bernoulli KL of the sampled token above 0.05
    "dppo_kl": ObjectiveSpec(
        "token", DivergenceGate(divergence="kl", low=0.05, high=0.05), "through_weight",
        "token_mean",
        source="arXiv 2602.04879, Binary-KL; bounds of its example in verl",
    ),
    # 1/N sum_i 1/L_i sum_t 4/tau sigmoid(tau (rho_t - 1)) A, tau = 1 where A > 0, 1.05 where A < 0
    "sapo": ObjectiveSpec(
        "token", SoftGate(), "through_weight", "response_mean",
        source="arXiv 2511.20347; checked against verl and TRL",
    ),
    # sg[C_L^k exp(lambda (1 - C_L)) A] log pi_t, (k, lambda) = (2, 3) where A > 0, (3, 2) below
    "vespo": ObjectiveSpec(
        "sequence_product", GammaKernel(), "detached", "token_mean",
        source="arXiv 2602.10693; powers, rates and the token mean as in TRL, which also bounds "
        "log C_L to [-18.4, 20]",
    ),
    # GRPO without the responses with A < 0 whose mean log-ratio lies below -delta
    "opsm": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.2), "through_weight", "response_mean",
        off_policy_mask=1e-4,
        source="DeepSeek-V3.2, arXiv 2512.02556, equation 9, the loss alone; it publishes no "
        "delta: 1e-4 is slime's default. There the mask's ratio is to the engine's "
        "log-probabilities: behavior: engine",
    ),
}
# fmt: on


# Weight, constraint, gradient, aggregation.
# fmt: off
EXPERIMENTAL: dict[str, ObjectiveSpec | OaplSpec] = {
    # w_t with PPO's clip
    "tepo_prefix": ObjectiveSpec(
        "prefix_mean", PpoClip(low=0.2, high=0.28), "detached", "token_mean",
        source="the ablation 'Sentence Prefix IS' of arXiv 2604.12736 as the PNPO paper describes "
        "it; formula and bounds not checked against the original",
    ),
    # rho_t * min_{k<t} rho_k with PPO's clip
    "minpro": ObjectiveSpec(
        "prefix_min", PpoClip(low=0.2, high=0.28), "detached", "token_mean",
        source="arXiv 2601.22718 as the PNPO paper describes it; formula and bounds not checked "
        "against the original",
    ),
    # f(rho_t) A log pi_t with f zero outside [1 - 0.3, 1 + 5]
    "sao": ObjectiveSpec(
        "token", HardGate(low=0.3, high=5.0), "detached", "token_mean",
        source="SAO's direct double-sided importance sampling, checked against public "
        "re-implementations, not against the original, where the bounds are strict and the "
        "ratio is taken to the engine's log-probabilities: give those as behavior_logprobs",
    ),
    # GRPO whose tokens are dropped where trainer and engine disagree by more than [0.5, 5]
    "icepop": ObjectiveSpec(
        "token", PpoClip(low=0.2, high=0.28), "through_weight", "token_mean",
        rollout_correction=RolloutCorrection(level="token", mode="mask", low=0.5, high=5.0),
        source="arXiv 2510.18855; factor and bounds as re-implemented in allenai/open-instruct, "
        "not checked against the original",
    ),
    # rho_t, except tokens that would push a response's total variation beyond 0.05 further
    "vaco": ObjectiveSpec(
        "token", TvFilter(threshold=0.05), "detached", "token_mean",
        source="arXiv 2603.01365, not checked against the original: without its advantage "
        "realignment; the total variation is taken per response, as in allenai/open-instruct; "
        "threshold ours",
    ),
    # 1/N sum_i (beta S_L - A_i)^2
    "oapl": OaplSpec(),
}
# fmt: on


Spec = ObjectiveSpec | OaplSpec | FunctionSpec
OBJECTIVES: dict[str, ObjectiveSpec | OaplSpec] = {**NAMED, **EXPERIMENTAL}
OBJECTIVE_NAMES = tuple(OBJECTIVES)


def choose_objective(name: str, overrides: Mapping[str, Any]) -> Spec:
    """Return the named specification with some of its fields replaced by plain values.

    `constraint` is a mapping: with a `kind` (a key of `CONSTRAINTS`) it is a complete constraint,
    without one it replaces fields of the objective's own. `kl` and `rollout_correction` are
    mappings of their fields. The name `function` needs the override `function`, a loss of the
    user's own. Raises ValueError with the nearest known name.
    """
    if name == FUNCTION or "function" in overrides:
        return _choose_function(name, overrides)
    _check_known(name, OBJECTIVES, "objective.name: unknown objective")
    default, where = OBJECTIVES[name], f"objective {name!r}"
    for key in overrides:
        _check_known(key, [*get_type_hints(type(default)), "name"], f"{where} has no option")
    choice: ObjectiveSpec | OaplSpec = _replace(default, overrides, where)
    return choice


def _choose_function(name: str, overrides: Mapping[str, Any]) -> FunctionSpec:
    options = [field.name for field in dataclasses.fields(FunctionSpec)]
    if name != FUNCTION:
        raise UserError(
            f"objective.name={name} and objective.function={overrides['function']} are both set; "
            "unset one"
        )
    if unknown := [key for key in overrides if key not in options]:
        raise UserError(
            f"objective.{unknown[0]} cannot be combined with objective.function, which takes only "
            f"{' and '.join(options[1:])}; compute it in the function, or unset it"
        )
    spec: FunctionSpec = _replace(FunctionSpec, overrides, "objective.function")
    return spec


def _replace(default: Any, values: Mapping[str, Any], where: str) -> Any:
    """Replace fields of a dataclass, or create an instance if `default` is a class."""
    cls = default if isinstance(default, type) else type(default)
    types = get_type_hints(cls)
    for key in values:
        _check_known(key, types, f"{where} has no option")
    read = {
        key: _read(value, types[key], getattr(default, key, None), where, key)
        for key, value in values.items()
    }
    if cls is default:
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in read:
                raise UserError(f"{where} needs {field.name!r}")
    try:
        return cls(**read) if cls is default else dataclasses.replace(default, **read)
    except ValueError as wrong:
        raise UserError(f"{where}: {wrong}") from None


def _read(value: Any, declared: Any, current: Any, where: str, key: str) -> Any:
    """Convert a plain value to a field's declared type; the dataclass checks the value itself."""
    types = get_args(declared) or (declared,)
    classes = [cls for cls in types if dataclasses.is_dataclass(cls)]
    if classes and not (value is None and type(None) in types):
        inner = f"objective.{key}"
        if len(classes) > 1:
            return _read_kind(value, current, inner)
        return _replace(classes[0], _require_mapping(value, classes[0], inner), inner)
    if isinstance(value, str) and float in types:  # YAML 1.1 reads 7e-4, without a point, as text
        try:
            return float(value)
        except ValueError:
            raise UserError(f"{where}: {key} is {value!r}: it must be a number") from None
    return value


def _read_kind(value: Any, current: Any, where: str) -> Any:
    """Build the constraint of the given kind, or replace fields of the current one."""
    if isinstance(value, str):
        value = {"kind": value}
    kinds = f"; or give a new one as {{kind: ...}} of {', '.join(CONSTRAINTS)}"
    fields = dict(_require_mapping(value, current, where, kinds))
    kind = fields.pop("kind", None)
    if kind is None:
        return _replace(current, fields, where)
    _check_known(str(kind), CONSTRAINTS, f"{where}.kind: unknown kind")
    return _replace(CONSTRAINTS[kind], fields, f"{where} {kind}")


def _require_mapping(value: Any, wanted: Any, where: str, further: str = "") -> Mapping[str, Any]:
    """Return the value if it is a mapping; otherwise raise UserError with the keys and an example.

    wanted: the dataclass that the mapping describes, or an instance with example values.
    """
    if isinstance(value, Mapping):
        return value
    every = {field.name: getattr(wanted, field.name, 0.1) for field in dataclasses.fields(wanted)}
    example = ", ".join(f"{k}: {v}" for k, v in list(every.items())[:2] if v is not None)
    keys = f"give its keys ({', '.join(every)}), as {{{example}}}" if every else "it has no keys"
    raise UserError(f"{where} is {value!r}: {keys}{further}")


def _check_known(word: str, known: Iterable[str], problem: str) -> None:
    known = sorted(known)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{problem} {word!r}{hint} (known: {', '.join(known)})")


# log w_L is about normal around 0 with a spread s between responses, so bounds of -s and +1.36 s
# keep Phi(1.36) - Phi(-1) = 0.75 of the last tokens. 1.36 is the paper's high / low.
HIGH_OVER_LOW = 9.5e-4 / 7e-4
WIDEST = 0.2  # largest `low` that is suggested: research/docs/third-study.md


def suggest_tolerances(choice: Spec, *, spread: float, length: float) -> dict[str, float] | None:
    """Suggest `low` and `high` for bounds on a mean of log-ratios; None for other objectives.

    spread: standard deviation of log w_L between responses of `length` tokens in the last epoch of
    reuse (the metric `epoch_<k>/by_fraction/1.0/prefix_mean_log_std`); above WIDEST a gate as wide
    as it no longer restrains the policy. An unbounded side stays unbounded. Numbers are rounded to
    the rule's accuracy, two digits.
    """
    if not isinstance(choice, ObjectiveSpec) or not isinstance(choice.constraint, Bounds):
        return None
    if choice.weight not in ("prefix_mean", "sequence_mean") or not spread > 0:
        return None
    bounds = choice.constraint
    # At the last position sqrt(L/t) is 1; a tolerance times t^p is widened or narrowed by L^p.
    at_the_end = length**bounds.power if bounds.power is not None else 1.0
    low = min(spread, WIDEST) / at_the_end
    sides = {"low": low, "high": HIGH_OVER_LOW * low}
    return {
        side: float(f"{value:.1e}")
        for side, value in sides.items()
        if getattr(bounds, side) is not None
    }
