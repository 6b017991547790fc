"""The objectives a third time: float64 numpy over whole responses, for thousands of tokens.

Takes the objectives' tables from naive.py and is compared with its loops by test_definitions.
Advantages are one number per response, as they are for a long one.
"""

import numpy as np

from tests.unit.objectives import naive


@np.errstate(over="ignore", invalid="ignore")  # what overflows is inf or nan, for the caller to see
def evaluate(spec, responses):
    """Loss and gradients of a minibatch, as `naive.evaluate`; `responses` are dicts of lists."""
    aggregation, tokens = spec[3], sum(len(r["log_ratios"]) for r in responses)
    loss, gradients = 0.0, []
    constraint = spec[1]
    if constraint[0] == "m2":
        constraint = ("largest", second_moment_bound(constraint[1], responses))
        spec = (spec[0], constraint, *spec[2:])
    if len(spec) > 4 and "balanced" in spec[4]:
        spec = (*spec[:4], {"negative": naive.balance(responses)})
    for response in responses:
        length = len(response["log_ratios"])
        value, gradient = response_terms(spec, response)
        denominator = {
            "response_mean": length * len(responses),
            "token_mean": tokens,
            "response_sum": len(responses),
        }[aggregation]
        loss -= value / denominator
        gradients.append(-gradient / denominator)
    return loss, gradients


def response_terms(spec, response):
    """J of one response and dJ/dlog pi, before aggregation."""
    weight, constraint, flow = spec[:3]
    ratios = np.array(response["log_ratios"])
    advantage = response["advantages"][0]
    factors = np.array(response.get("factors", np.ones(len(ratios))))
    log_w = log_weights(weight, ratios)
    value, slope = constrain(constraint, log_w, advantage, response)
    if advantage < 0 and len(spec) > 4:
        factor = spec[4].get("negative", 1.0) * (ratios.mean() >= -spec[4].get("mask", np.inf))
        value, slope = (x * factor if factor else np.zeros(len(ratios)) for x in (value, slope))
    # A factor of 0 drops a token, whatever its weight.
    value, slope = (np.where(factors == 0, 0, x) for x in (value, slope))
    if flow == "detached":
        slope = slope * factors
        return np.where(slope == 0, 0, slope * np.array(response["logprobs"])).sum(), slope
    slope, gradient = slope * factors, np.zeros(len(ratios))
    if weight == "token":
        gradient = slope
    elif weight == "prefix_product":  # d S_t / d l_k = 1 for k <= t
        gradient = slope[::-1].cumsum()[::-1]
    elif weight == "sequence_mean":
        gradient[:] = slope.sum() / len(ratios)
    else:
        raise AssertionError(f"no named objective has a gradient through {weight}")
    return (value * factors).sum(), gradient


def second_moment_bound(threshold, responses):
    """The largest square of a log-ratio that M2PO's mask leaves, inf where it masks none."""
    ratios = np.concatenate([r["log_ratios"] for r in responses])
    advantages = np.concatenate([r["advantages"] for r in responses])
    squares = np.sort(ratios[np.sign(ratios) * np.sign(advantages) > 0] ** 2)
    below = squares.cumsum() <= threshold * np.arange(1, len(squares) + 1)
    if below.all():
        return np.inf
    return squares[below].max(initial=0.0)


def log_weights(weight, ratios):
    """The logarithm of the weight at every position."""
    sums, t = ratios.cumsum(), np.arange(1, len(ratios) + 1)
    if weight == "prefix_min":
        before = np.minimum.accumulate(np.append(np.inf, ratios[:-1]))
        return ratios + np.where(np.isinf(before), 0, before)
    return {
        "token": ratios,
        "prefix_mean": sums / t,
        "prefix_product": sums,
        "sequence_mean": np.full(len(ratios), sums[-1] / len(ratios)),
        "sequence_product": np.full(len(ratios), sums[-1]),
        "one": np.zeros(len(ratios)),
    }[weight]


def constrain(constraint, log_w, advantage, response):
    """(what enters J through the weight, what multiplies the score), both times A."""
    ratios = np.array(response["log_ratios"])
    kind, t = constraint[0], np.arange(1, len(ratios) + 1)
    ratio = np.exp(log_w)
    if not advantage:
        return np.zeros(len(ratios)), np.zeros(len(ratios))
    if kind == "none":
        return ratio * advantage, ratio * advantage
    if kind == "taper":
        term = np.clip(ratio, *(constraint[1:3] if advantage > 0 else constraint[3:5])) * advantage
        return term, term
    if kind == "soft":
        temperature = constraint[1] if advantage > 0 else constraint[2]
        moved = temperature * (np.minimum(ratio, 1e30) - 1)
        gate, rest = 1 / (1 + np.exp(-moved)), 1 / (1 + np.exp(moved))
        slope = 4 * gate * rest * np.minimum(ratio, 1e30)
        return 4 / temperature * gate * advantage, slope * advantage
    if kind == "gamma":
        power, rate = constraint[1:3] if advantage > 0 else constraint[3:5]
        term = np.exp(power * log_w + rate * (1 - ratio)) * advantage
        return term, term
    if kind in ("tv", "budget", "largest", "divergence"):
        if kind == "divergence":
            after = np.array(response["logprobs"])
            before = after - ratios
            distance = np.abs(np.exp(after) - np.exp(before))
            if constraint[1] == "kl":
                rest, rest_after = -np.expm1(before), -np.expm1(after)
                distance = rest * np.log(rest / rest_after) - np.exp(before) * ratios
            within = distance <= (constraint[3] if advantage > 0 else constraint[2])
        elif kind == "tv":
            within = np.abs(np.expm1(np.minimum(ratios, 60))).mean() / 2 <= constraint[1]
        elif kind == "budget":
            w = np.linspace(1, constraint[3], len(ratios))
            policy = np.array(response["logprobs"])
            change = w * np.abs(np.exp(policy) - np.exp(policy - ratios))
            room = constraint[1] + constraint[2] * (w.cumsum() - w)
            within = (change <= constraint[1]) & (change.cumsum() <= room)
        else:
            within = ratios**2 <= constraint[1]
        keep = within | (advantage * ratios <= 0)
        term = np.where(keep, ratio, 0) * advantage
        return term, term
    _, low, high, extra, space, power = constraint
    h = np.sqrt(len(ratios) / t) if power == "sqrt" else t.astype(float) ** power
    transform = np.exp if space == "log" else lambda x: 1 + x
    lower = np.zeros(len(ratios)) if low is None else transform(-low * h)
    upper = np.full(len(ratios), np.inf) if high is None else transform(high * h)
    if kind == "truncate":
        term = np.clip(ratio, lower, upper) * advantage
        return term, term
    if kind == "gate":
        below, above = ratio < lower, ratio > upper
        if extra == naive.ADVANTAGE:
            below, above = below & (advantage < 0), above & (advantage > 0)
        term = np.where(below | above, 0, ratio) * advantage
        return term, term
    value = np.minimum(ratio * advantage, np.clip(ratio, lower, upper) * advantage)
    if extra is not None and advantage < 0:
        value = np.maximum(value, (extra if space == "ratio" else np.exp(extra * h)) * advantage)
    return value, np.where(value == ratio * advantage, value, 0)
