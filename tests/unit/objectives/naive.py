"""The objectives once more, as double loops over Python floats, written from their formulas.

Shares nothing with the package: the named objectives are typed in again from the papers' tables,
ratios are compared as ratios and not as logarithms, sums over prefixes are taken anew at every
position, and gradients are the derivatives of the formulas, not autograd's.
"""

import math

BOTH, ADVANTAGE = "both", "advantage"
# weight, constraint, flow, aggregation. A clip or gate is (kind, low, high, dual or sides, space,
# p) with h = t^p or, for "sqrt", sqrt(L/t).
NAMED = {
    "pnpo": (
        "prefix_mean",
        ("gate", 7e-4, 9.5e-4, BOTH, "ratio", "sqrt"),
        "detached",
        "response_mean",
    ),
    "gspo": (
        "sequence_mean",
        ("clip", 3e-4, 4e-4, None, "ratio", 0),
        "through_weight",
        "response_mean",
    ),
    "grpo": ("token", ("clip", 0.2, 0.28, 10.0, "ratio", 0), "through_weight", "token_mean"),
    "ppo": ("token", ("clip", 0.2, 0.2, None, "ratio", 0), "through_weight", "token_mean"),
    "dapo": ("token", ("clip", 0.2, 0.28, None, "ratio", 0), "through_weight", "token_mean"),
    "ctpo": (
        "prefix_product",
        ("clip", 0.025, 0.05, 0.05, "log", 0.5),
        "detached",
        "response_mean",
    ),
    "ctpo_geomean": (
        "prefix_mean",
        ("clip", 0.025, 0.05, 0.05, "log", -0.5),
        "detached",
        "response_mean",
    ),
    "tepo_prefix": ("prefix_mean", ("clip", 0.2, 0.28, None, "ratio", 0), "detached", "token_mean"),
    "minpro": ("prefix_min", ("clip", 0.2, 0.28, None, "ratio", 0), "detached", "token_mean"),
    "local_surrogate": ("token", ("none",), "through_weight", "response_sum"),
    "exact_prefix_score": ("prefix_product", ("none",), "through_weight", "response_sum"),
    "exact_token_score": ("prefix_product", ("none",), "detached", "response_sum"),
    "cispo": ("token", ("truncate", None, 4.0, None, "ratio", 0), "detached", "token_mean"),
    "sao": ("token", ("gate", 0.3, 5.0, BOTH, "ratio", 0), "detached", "token_mean"),
    "icepop": ("token", ("clip", 0.2, 0.28, None, "ratio", 0), "through_weight", "token_mean"),
    "vaco": ("token", ("tv", 0.05), "detached", "token_mean"),
}


def exp(x):
    """e^x, infinite where Python would raise."""
    return math.exp(x) if x < 709.7 else math.inf


def times(weight, advantage):
    """weight * A, where a token without advantage has no term at all."""
    return weight * advantage if advantage else 0.0


def log_weight(weight, ratios, t):
    """log of the weight at position t (from 1), and its derivatives by l_1, ..., l_L."""
    length = len(ratios)
    if weight == "token":
        return ratios[t - 1], {t: 1.0}
    if weight == "prefix_mean":
        return sum(ratios[:t]) / t, dict.fromkeys(range(1, t + 1), 1 / t)
    if weight == "prefix_product":
        return sum(ratios[:t]), dict.fromkeys(range(1, t + 1), 1.0)
    if weight == "prefix_min":
        if t == 1:
            return ratios[0], {1: 1.0}
        smallest = min(ratios[: t - 1])
        return ratios[t - 1] + smallest, {t: 1.0, ratios.index(smallest) + 1: 1.0}
    if weight == "sequence_mean":
        return sum(ratios) / length, dict.fromkeys(range(1, length + 1), 1 / length)
    if weight == "sequence_product":
        return sum(ratios), dict.fromkeys(range(1, length + 1), 1.0)
    raise AssertionError(weight)


def bounds(low, high, space, power, t, length):
    """The interval of the ratio at position t."""
    h = math.sqrt(length / t) if power == "sqrt" else t**power
    if space == "log":
        return (0.0 if low is None else exp(-low * h)), (
            math.inf if high is None else exp(high * h)
        )
    return (0.0 if low is None else 1 - low * h), (math.inf if high is None else 1 + high * h)


def constrain(constraint, ratio, advantage, t, ratios):
    """(value of the term per unit of log-probability slope, slope, accepted).

    value: what multiplies A in J where the gradient flows through the weight; slope: what
    multiplies A times the gradient of log weight (through_weight) or of log pi (detached).
    """
    length, kind = len(ratios), constraint[0]
    if kind == "none":
        return times(ratio, advantage), times(ratio, advantage), True
    if kind == "tv":
        variation = sum(abs(exp(min(r, 60)) - 1) for r in ratios) / (2 * length)
        keep = variation <= constraint[1] or advantage * ratios[t - 1] <= 0
        return (times(ratio, advantage),) * 2 + (True,) if keep else (0.0, 0.0, False)
    _, low, high, extra, space, power = constraint
    lower, upper = bounds(low, high, space, power, t, length)
    clipped = min(max(ratio, lower), upper)
    if kind == "truncate":
        return times(clipped, advantage), times(clipped, advantage), clipped == ratio
    if kind == "gate":
        below, above = ratio < lower, ratio > upper
        if extra == ADVANTAGE:
            below, above = below and advantage < 0, above and advantage > 0
        keep = not (below or above)
        return (times(ratio, advantage),) * 2 + (True,) if keep else (0.0, 0.0, False)
    value = min(times(ratio, advantage), times(clipped, advantage))
    if extra is not None and advantage < 0:
        dual = extra if space == "ratio" else bounds(None, extra, space, power, t, length)[1]
        value = max(value, dual * advantage)
    active = value == times(ratio, advantage)
    return value, (value if active else 0.0), active


def response_terms(spec, ratios, logprobs, advantages, factors):
    """J's terms of one response, dJ/dlog pi_k before aggregation, and what was accepted."""
    weight, constraint, flow, _ = spec
    length = len(ratios)
    values, gradient, accepted = [], [0.0] * length, 0
    for t in range(1, length + 1):
        log_w, derivatives = log_weight(weight, ratios, t)
        value, slope, keep = constrain(constraint, exp(log_w), advantages[t - 1], t, ratios)
        accepted += keep and advantages[t - 1] != 0  # others cannot move the policy
        factor = factors[t - 1]
        if not factor:  # dropped, whatever its weight
            value = slope = 0.0
        if flow == "detached":
            values.append(slope * logprobs[t - 1] * factor if slope else 0.0)
            gradient[t - 1] += slope * factor
        else:
            values.append(value * factor)
            truncated = constraint[0] == "truncate" and not keep
            for k, derivative in derivatives.items():
                gradient[k - 1] += 0.0 if truncated else slope * derivative * factor
    return values, gradient, accepted


def evaluate(spec, responses, constant=1.0):
    """Loss, gradients and acceptance of a minibatch; `responses` are dicts of lists.

    Acceptance is a share of the tokens whose advantage is not 0, and 1 where there are none.
    """
    aggregation = spec[3]
    tokens = sum(len(r["log_ratios"]) for r in responses)
    loss, gradients, accepted = 0.0, [], 0
    movable = sum(a != 0 for r in responses for a in r["advantages"])
    for response in responses:
        ratios = response["log_ratios"]
        factors = response.get("factors", [1.0] * len(ratios))
        values, gradient, kept = response_terms(
            spec, ratios, response["logprobs"], response["advantages"], factors
        )
        denominator = {
            "response_mean": len(ratios) * len(responses),
            "token_mean": tokens,
            "response_sum": len(responses) * constant,
            "token_sum": constant,
        }[aggregation]
        loss -= sum(values) / denominator
        gradients.append([-g / denominator for g in gradient])
        accepted += kept
    return loss, gradients, accepted / movable if movable else 1.0
