"""Every objective against double loops over Python floats: values, gradients, acceptance."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.objectives.objective import Objective
from megatron_rl.objectives.spec import (
    DivergenceGate,
    GammaKernel,
    HardGate,
    ObjectiveSpec,
    PpoClip,
    PrefixBudget,
    SecondMoment,
    SoftGate,
    Taper,
    Truncate,
    TvFilter,
    Unconstrained,
)
from megatron_rl.types import Denominators
from tests.unit.objectives import naive

PATH_SUMS = {"gspo", "exact_prefix_score"}  # one token's side is in every gradient


def make_batch(rng, lengths, scale, *, extreme=False, constant_advantage=True):
    """Responses with holes in their masks: prompt, tool output, padding contain rubbish."""
    responses, rows = [], []
    for length in lengths:
        log_ratios = rng.normal(0, scale, length)
        if extreme:
            log_ratios[rng.integers(length)] = rng.choice([-1e4, 1e4])
        logprobs = np.minimum(log_ratios, 0) - rng.exponential(1.0, length)  # behavior <= 0
        advantage = rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0], length)
        if constant_advantage:
            advantage[:] = advantage[0]
        gaps = rng.normal(0, 1.0, length)
        responses.append(
            {
                "log_ratios": log_ratios.tolist(),
                "logprobs": logprobs.tolist(),
                "advantages": advantage.tolist(),
                "gaps": gaps.tolist(),
            }
        )
        padded = length + rng.integers(0, 6)
        places = np.sort(rng.choice(padded, length, replace=False))
        rows.append((padded, places))
    return responses, rows


def pack(responses, rows):
    """The same batch as one pack with nan, inf and 1e30 off the mask."""
    total = sum(padded for padded, _ in rows)
    rubbish = torch.tensor([math.nan, math.inf, 1e30, -math.inf], dtype=torch.float64)
    names = ("policy", "behavior", "advantages", "rollout")
    tensors = {name: rubbish.repeat(total)[:total].clone() for name in names}
    mask = torch.zeros(total).bool()
    start, index = 0, []
    for response, (padded, places) in zip(responses, rows, strict=True):
        where = torch.tensor(start + places)
        log_ratio = torch.tensor(response["log_ratios"], dtype=torch.float64)
        policy = torch.tensor(response["logprobs"], dtype=torch.float64)
        tensors["policy"][where] = policy
        tensors["behavior"][where] = policy - log_ratio
        tensors["advantages"][where] = torch.tensor(response["advantages"], dtype=torch.float64)
        gaps = torch.tensor(response["gaps"], dtype=torch.float64)
        tensors["rollout"][where] = policy - log_ratio - gaps
        mask[where] = True
        index.append(where)
        start += padded
    return tensors, mask, index


def run(objective, responses, rows):
    """Loss, gradient per response, metrics of the package's implementation."""
    tensors, mask, index = pack(responses, rows)
    loss, gradient, metrics = run_tensors(objective, tensors, mask, rows)
    assert not gradient[~mask].any(), "a token off the mask received a gradient"
    return loss, [gradient[where].tolist() for where in index], metrics


def run_tensors(objective, tensors, mask, rows):
    """Loss, gradient [T] and metrics for a pack in the dtype of its tensors."""
    policy = tensors["policy"].clone().requires_grad_()
    log_ratios = tensors["policy"] - tensors["behavior"]
    resolved = (log_ratios[mask], tensors["advantages"][mask], tensors["behavior"][mask])
    result = objective.resolve(MinibatchTokens.whole(*resolved))(
        TokenInputs(
            policy_logprobs=policy,
            behavior_logprobs=tensors["behavior"],
            advantages=tensors["advantages"],
            rollout_logprobs=tensors["rollout"],
        ),
        layout=SequenceLayout([padded for padded, _ in rows], mask),
        denominators=Denominators(responses=float(len(rows)), tokens=float(mask.sum())),
    )
    result.loss.sum().backward()
    return result.loss.sum().item(), policy.grad.double(), result.statistics.to_metrics()


def check(objective, spec, responses, rows, constant=1.0):
    """The package and the loops agree, or both find the numbers beyond float64."""
    compare(objective, naive.evaluate(spec, responses, constant), responses, rows)


def compare(objective, wanted, responses, rows):
    """The package finds the loss, gradients and acceptance that are wanted."""
    wanted_loss, wanted_gradients, acceptance = wanted
    if not math.isfinite(wanted_loss):
        with pytest.raises(ValueError, match="weight overflows"):
            run(objective, responses, rows)
        return
    loss, gradients, metrics = run(objective, responses, rows)
    assert loss == pytest.approx(wanted_loss, rel=1e-9, abs=1e-12)
    for got, wanted in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-14)
    assert metrics["gate/acceptance"] == pytest.approx(acceptance, abs=1e-12)
    assert metrics["loss/policy"] == pytest.approx(wanted_loss, rel=1e-9, abs=1e-12)


def with_icepop_factors(name, responses):
    """IcePop's token factor exp(behavior - rollout), dropped outside [0.5, 5]."""
    if name == "icepop":
        for response in responses:
            factors = [math.exp(gap) for gap in response["gaps"]]
            response["factors"] = [f if 0.5 <= f <= 5 else 0.0 for f in factors]
    return responses


def test_every_named_objective_has_second_definition():
    assert set(naive.NAMED) == set(OBJECTIVE_NAMES) - {"oapl"}


@pytest.mark.parametrize("name", naive.NAMED)
@settings(max_examples=8, deadline=None)
@example(seed=1, lengths=[1, 500, 2], scale=3e-4, extreme=False)
@example(seed=2, lengths=[1, 500, 2], scale=0.3, extreme=False)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    scale=st.sampled_from([0.0, 3e-4, 3e-3, 0.3, 2.0]),
    extreme=st.booleans(),
)
def test_named_objectives_equal_their_formulas(name, seed, lengths, scale, extreme):
    rng = np.random.default_rng(seed)
    responses, rows = make_batch(rng, lengths, scale, extreme=extreme)
    responses = with_icepop_factors(name, responses)
    check(build_objective(name), naive.NAMED[name], responses, rows)


# From 1 to thousands: as many of tens as of thousands.
LENGTHS = st.lists(st.floats(0, 3.6).map(lambda x: int(10**x)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", naive.NAMED)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS, scale=st.sampled_from([3e-4, 3e-3, 0.3]))
def test_float32_is_float64_to_its_rounding(name, seed, lengths, scale):
    rng = np.random.default_rng(seed)
    responses, rows = make_batch(rng, lengths, scale)
    tensors, mask, _ = pack(with_icepop_factors(name, responses), rows)
    in_float32 = {k: x.float() for k, x in tensors.items()}
    objective = build_objective(name)
    # The same numbers in both: what differs is the arithmetic, and S_t is summed in float64.
    exact = run_tensors(objective, {k: x.double() for k, x in in_float32.items()}, mask, rows)
    loss, gradient, metrics = run_tensors(objective, in_float32, mask, rows)
    # A token within rounding of its bound may fall on the other side: at most a few of them.
    flipped = (gradient == 0) != (exact[1] == 0)
    assert flipped.sum() <= 1 + 1e-3 * len(flipped)
    near = ~flipped & mask
    if name not in PATH_SUMS or not flipped.any():
        size = exact[1].abs().max().item()
        torch.testing.assert_close(gradient[near], exact[1][near], rtol=1e-4, atol=1e-5 * size)
    assert metrics["gate/acceptance"] == pytest.approx(
        exact[2]["gate/acceptance"], abs=2e-3 + 2 / len(near)
    )
    assert math.isfinite(loss)


CONSTRAINTS = {
    ("clip", 0.02, 0.03, None, "ratio", 0): PpoClip(low=0.02, high=0.03),
    ("clip", None, 0.03, 1.5, "ratio", 0): PpoClip(low=None, high=0.03, dual=1.5),
    ("clip", 0.02, 0.03, 0.1, "log", 0.5): PpoClip(
        low=0.02, high=0.03, dual=0.1, space="log", scale="t^p", power=0.5
    ),
    ("gate", 0.02, 0.03, "both", "ratio", 0): HardGate(low=0.02, high=0.03),
    ("gate", 0.02, 0.03, "advantage", "ratio", "sqrt"): HardGate(
        low=0.02, high=0.03, sided="advantage", scale="sqrt(L/t)"
    ),
    ("gate", 0.6, None, "both", "ratio", "sqrt"): HardGate(
        low=0.6, high=None, scale="sqrt(L/t)"
    ),  # 1 - low * h below 0 at early positions: no lower bound there
    ("gate", 0.02, 0.03, "both", "log", -0.5): HardGate(
        low=0.02, high=0.03, space="log", scale="t^p", power=-0.5
    ),
    ("truncate", 0.02, 0.03, None, "ratio", 0): Truncate(low=0.02, high=0.03),
    ("tv", 0.01): TvFilter(threshold=0.01),
    ("taper", 0.99, 1.02, 0.98, 1.01): Taper(
        positive_low=0.99, positive_high=1.02, negative_low=0.98, negative_high=1.01
    ),
    ("budget", 0.004, 0.002, 0.5): PrefixBudget(threshold=0.004, average=0.002, floor=0.5),
    ("m2", 2e-4): SecondMoment(threshold=2e-4),
    ("divergence", "tv", 0.003, 0.004): DivergenceGate(divergence="tv", low=0.003, high=0.004),
    ("divergence", "kl", 1e-4, 2e-4): DivergenceGate(divergence="kl", low=1e-4, high=2e-4),
    ("soft", 3.0, 5.0): SoftGate(positive_temperature=3.0, negative_temperature=5.0),
    ("gamma", 2.0, 3.0, 3.0, 2.0): GammaKernel(),
    ("none",): Unconstrained(),
}
WEIGHTS = (
    "token",
    "prefix_mean",
    "prefix_product",
    "prefix_min",
    "sequence_mean",
    "sequence_product",
    "one",
)
AGGREGATIONS = ("response_mean", "token_mean", "response_sum", "token_sum")


@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_combination_of_axes(weight):
    rng = np.random.default_rng(3)
    combinations = itertools.product(CONSTRAINTS, ("detached", "through_weight"))
    for number, (plain, gradient) in enumerate(combinations):
        aggregation = AGGREGATIONS[3 * number // 2 % 4]  # each with each of the two gradients
        constraint = CONSTRAINTS[plain]
        scaled = getattr(constraint, "scale", "constant") != "constant"
        if weight.startswith("sequence_") and scaled:
            continue  # refused, see test_bad_input
        if weight in ("prefix_min", "one") and gradient == "through_weight":
            continue  # refused too
        if weight == "one" and plain[0] not in ("none", "tv", "budget", "divergence", "m2"):
            continue  # without effect, so refused
        if plain[0] == "gamma" and gradient == "through_weight":
            continue  # refused as well
        if plain[0] == "m2" and weight != "token":
            continue  # and this
        constant = 7.0 if aggregation.endswith("_sum") else 1.0
        objective = Objective(
            ObjectiveSpec(
                weight=weight,
                constraint=constraint,
                gradient=gradient,
                aggregation=aggregation,
                constant=constant,
            )
        )
        spec = (weight, plain, gradient, aggregation)
        for extreme in (False, True):
            # Advantages that vary within a response separate the two gradients.
            responses, rows = make_batch(
                rng, [1, 9, 20], 0.02, extreme=extreme, constant_advantage=False
            )
            check(objective, spec, responses, rows, constant)
