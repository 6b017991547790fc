"""The objectives once more, as double loops over Python floats, written from their formulas.

Shares nothing with the package: the named objectives are typed in again from the papers' tables,
ratios are compared as ratios and not as logarithms, sums over prefixes are computed again at every
position, and gradients are the derivatives of the formulas, not autograd's.
"""

import math

BOTH, ADVANTAGE = "both", "advantage"
# weight, constraint, flow, aggregation. A clip or gate is (kind, low, high, dual or sides, space,
# p) with h = t^p or, for "sqrt", sqrt(L/t). A taper is (kind, a+, b+, a-, b-), a budget (kind,
# delta, delta_b, w_min), the second moment (kind, its threshold), a divergence (kind, tv or kl,
# low, high), a soft gate (kind, tau+, tau-), a gamma kernel (kind, k+, lambda+, k-, lambda-). A
# fifth entry has what else happens where A < 0: the factor "negative", the delta of "mask".
NAMED = {
    "pnpo": (
        "prefix_mean",
        ("gate", 7e-4, 9.5e-4, BOTH, "ratio", "sqrt"),
        "detached",
        "response_mean",
    ),
    "pnpo_one_sided": (
        "prefix_mean",
        ("gate", 7e-4, 9.5e-4, ADVANTAGE, "ratio", "sqrt"),
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
    "m2po": ("token", ("m2", 0.04), "through_weight", "token_mean"),
    "cppo": ("token", ("budget", 0.15, 0.015, 0.8), "through_weight", "token_mean"),
    "topr": ("sequence_product", ("taper", 1.0, 1.0, 0.0, 1.0), "detached", "response_sum"),
    "sft": ("one", ("none",), "detached", "token_mean"),
    "asymre": ("one", ("none",), "detached", "response_sum"),
    "positive_only": ("one", ("none",), "detached", "response_mean", {"negative": 0.0}),
    "damped_negatives": ("one", ("none",), "detached", "response_mean", {"negative": 0.1}),
    "balanced": (
        "sequence_mean",
        ("gate", 3e-4, None, ADVANTAGE, "ratio", 0),
        "detached",
        "response_mean",
        {"balanced": True},
    ),
    "balanced_prefix": (
        "prefix_mean",
        ("gate", 7e-4, None, ADVANTAGE, "ratio", "sqrt"),
        "detached",
        "response_mean",
        {"balanced": True},
    ),
    "dppo_tv": ("token", ("divergence", "tv", 0.15, 0.15), "through_weight", "token_mean"),
    "dppo_kl": ("token", ("divergence", "kl", 0.05, 0.05), "through_weight", "token_mean"),
    "sapo": ("token", ("soft", 1.0, 1.05), "through_weight", "response_mean"),
    "vespo": ("sequence_product", ("gamma", 2.0, 3.0, 3.0, 2.0), "detached", "token_mean"),
    "opsm": (
        "token",
        ("clip", 0.2, 0.2, None, "ratio", 0),
        "through_weight",
        "response_mean",
        {"mask": 1e-4},
    ),
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
    if weight == "one":
        return 0.0, {}
    raise AssertionError(weight)


def bounds(low, high, space, power, t, length):
    """The interval of the ratio at position t."""
    h = math.sqrt(length / t) if power == "sqrt" else t**power
    if space == "log":
        return (0.0 if low is None else exp(-low * h)), (
            math.inf if high is None else exp(high * h)
        )
    return (0.0 if low is None else 1 - low * h), (math.inf if high is None else 1 + high * h)


def second_moment_mask(threshold, responses):
    """M2PO's algorithm 1: for each response and token whether it stays."""
    mask = [[True] * len(r["log_ratios"]) for r in responses]
    trusted = [
        (log_ratio**2, i, t)
        for i, r in enumerate(responses)
        for t, (log_ratio, a) in enumerate(zip(r["log_ratios"], r["advantages"], strict=True))
        if (a > 0 and log_ratio > 0) or (a < 0 and log_ratio < 0)
    ]
    while trusted and sum(square for square, _, _ in trusted) / len(trusted) > threshold:
        largest = max(trusted)
        mask[largest[1]][largest[2]] = False
        trusted.remove(largest)
    return mask


def balance(responses):
    """The factor of A < 0 that brings its noise down to that of A > 0; at most 1."""
    noise = {1: 0.0, -1: 0.0}
    for r in responses:
        for a, logprob, log_ratio in zip(
            r["advantages"], r["logprobs"], r["log_ratios"], strict=True
        ):
            if a:
                noise[1 if a > 0 else -1] += (a * (1 - exp(logprob - log_ratio))) ** 2
    return min(1.0, math.sqrt(noise[1] / noise[-1])) if noise[-1] else 1.0


def within_budget(constraint, t, ratios, logprobs):
    """CPPO's condition on the token at t and on its prefix."""
    _, delta, delta_b, floor = constraint
    moved, allowed = 0.0, 0.0  # S_j and W_j
    for j in range(1, t + 1):
        w = 1 - (1 - floor) / (len(ratios) - 1) * (j - 1) if len(ratios) > 1 else 1.0
        before = allowed
        change = w * abs(exp(logprobs[j - 1]) - exp(logprobs[j - 1] - ratios[j - 1]))
        moved, allowed = moved + change, allowed + w
    return change <= delta and moved <= delta + delta_b * before


def divergence_beyond(constraint, log_ratio, logprob, advantage):
    """DPPO's condition for rejecting a token: moved in the direction of A, and too far."""
    _, kind, low, high = constraint
    after, before = exp(logprob), exp(logprob - log_ratio)
    if kind == "tv":
        distance = abs(after - before)
    else:
        distance = before * -log_ratio + (1 - before) * math.log((1 - before) / (1 - after))
    if advantage > 0:
        return after > before and distance > high
    return advantage < 0 and after < before and distance > low


def soft(temperature, ratio):
    """SAPO's gate and r times its derivative."""
    moved = temperature * (ratio - 1)
    up, down = 1 / (1 + exp(-moved)), 1 / (1 + exp(moved))
    return 4 / temperature * up, (4 * up * down * ratio if down else 0.0)


def constrain(constraint, ratio, advantage, t, response):
    """(value of the term per unit of log-probability slope, slope, accepted).

    value: what multiplies A in J where the gradient flows through the weight; slope: what
    multiplies A times the gradient of log weight (through_weight) or of log pi (detached).
    """
    ratios = response["log_ratios"]
    length, kind = len(ratios), constraint[0]
    if kind == "none":
        return times(ratio, advantage), times(ratio, advantage), True
    if kind == "taper":
        lower, upper = constraint[1:3] if advantage >= 0 else constraint[3:5]
        clipped = min(max(ratio, lower), upper)
        return (times(clipped, advantage),) * 2 + (clipped == ratio,)
    if kind == "soft":
        value, slope = soft(constraint[1] if advantage > 0 else constraint[2], ratio)
        return value * advantage, slope * advantage, True
    if kind == "gamma":
        power, rate = constraint[1:3] if advantage > 0 else constraint[3:5]
        weight = 0.0
        if 0 < ratio < 1e300:
            weight = exp(power * math.log(ratio) + rate * (1 - ratio))
        return (weight * advantage,) * 2 + (True,)
    if kind in ("tv", "budget", "m2", "divergence"):
        if kind == "divergence":
            logprob = response["logprobs"][t - 1]
            keep = not divergence_beyond(constraint, ratios[t - 1], logprob, advantage)
        elif kind == "tv":
            variation = sum(abs(exp(min(r, 60)) - 1) for r in ratios) / (2 * length)
            keep = variation <= constraint[1] or advantage * ratios[t - 1] <= 0
        elif kind == "budget":
            toward = advantage * ratios[t - 1] <= 0
            keep = toward or within_budget(constraint, t, ratios, response["logprobs"])
        else:
            keep = response["stays"][t - 1]
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


def response_terms(spec, response, factors):
    """J's terms of one response, dJ/dlog pi_k before aggregation, and what was accepted."""
    weight, constraint, flow = spec[:3]
    extra = spec[4] if len(spec) > 4 else {}
    ratios, logprobs, advantages = (response[k] for k in ("log_ratios", "logprobs", "advantages"))
    length = len(ratios)
    values, gradient, accepted = [], [0.0] * length, 0
    for t in range(1, length + 1):
        log_w, derivatives = log_weight(weight, ratios, t)
        value, slope, keep = constrain(constraint, exp(log_w), advantages[t - 1], t, response)
        if advantages[t - 1] < 0:
            factor = extra.get("negative", 1.0)
            if sum(ratios) / length < -extra.get("mask", math.inf):
                factor = 0.0
            value, slope = (x * factor if factor else 0.0 for x in (value, slope))
            keep = keep and factor != 0
        accepted += keep and advantages[t - 1] != 0  # others cannot move the policy
        factor = factors[t - 1]
        if not factor:  # dropped, whatever its weight
            value = slope = 0.0
        if flow == "detached":
            values.append(slope * logprobs[t - 1] * factor if slope else 0.0)
            gradient[t - 1] += slope * factor
        else:
            values.append(value * factor)
            truncated = constraint[0] in ("truncate", "taper") and not keep
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
    if spec[1][0] == "m2":
        masks = second_moment_mask(spec[1][1], responses)
        responses = [r | {"stays": m} for r, m in zip(responses, masks, strict=True)]
    if len(spec) > 4 and "balanced" in spec[4]:
        spec = (*spec[:4], {"negative": balance(responses)})
    movable = sum(a != 0 for r in responses for a in r["advantages"])
    for response in responses:
        ratios = response["log_ratios"]
        factors = response.get("factors", [1.0] * len(ratios))
        values, gradient, kept = response_terms(spec, response, factors)
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
