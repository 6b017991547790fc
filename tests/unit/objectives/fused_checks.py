"""The Triton kernel against the torch path; run by test_fused in a process of its own.

Triton decides at its import whether it interprets, so the variable must be set before that.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.objectives import NAMED, build_objective, fused, policy_loss
from megatron_rl.objectives.objective import Objective
from megatron_rl.objectives.spec import HardGate, ObjectiveSpec, PpoClip, Truncate
from tests.unit.objectives import test_definitions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COVERED = [name for name, spec in NAMED.items() if fused.covers(spec)]


def batch(dtype, *, scale=1e-2, rollout=True):
    generator = torch.Generator().manual_seed(4)
    shape = (5, 230)

    def normal(size):
        return torch.randn(shape, dtype=torch.float64, generator=generator) * size

    behavior = -1 - normal(0.3).abs()
    drift = normal(scale)
    drift[:, ::17] *= 300  # some far beyond every bound
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[3] = False
    given = {
        "policy_logprobs": behavior + drift,
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5]),
        "response_mask": mask,
    }
    if rollout:
        given["rollout_logprobs"] = behavior + normal(0.1)
    return {k: v.to(DEVICE, dtype if v.is_floating_point() else None) for k, v in given.items()}


def evaluate(objective, given):
    policy = given["policy_logprobs"].clone().requires_grad_()
    loss, metrics = policy_loss(objective, **given | {"policy_logprobs": policy})
    loss.backward()
    return loss.item(), policy.grad, metrics


def compare(objective, given, tolerance):
    assert isinstance(objective, Objective)
    loss, gradient, metrics = evaluate(Objective(objective.spec, fused=False), given)
    got = evaluate(Objective(objective.spec, fused=True), given)
    assert got[0] == pytest.approx(loss, rel=tolerance, abs=tolerance * 1e-3)
    torch.testing.assert_close(got[1], gradient, rtol=tolerance, atol=tolerance * 1e-3)
    assert set(got[2]) == set(metrics)
    for key, value in metrics.items():
        assert got[2][key] == pytest.approx(value, rel=10 * tolerance, abs=10 * tolerance), key


@pytest.mark.parametrize("name", COVERED)
def test_float64_agrees_to_rounding(name):
    compare(build_objective(name), batch(torch.float64), 1e-11)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31 - 1),
    lengths=st.lists(st.floats(0, 3).map(lambda x: int(10**x)), min_size=1, max_size=3),
    scale=st.sampled_from([0.0, 3e-4, 1e-2, 0.3]),
    extreme=st.booleans(),
)
@pytest.mark.parametrize("name", COVERED)
def test_float32_agrees_to_its_rounding(name, seed, lengths, scale, extreme):
    # Lengths from 1 to 1,000. A weight that overflows is the same error on both paths.
    given_batch = random_batch(torch.Generator().manual_seed(seed), lengths, scale, extreme)
    try:
        compare(build_objective(name), given_batch, 2e-5)
    except ValueError as problem:
        assert extreme and "weight overflows" in str(problem)
        with pytest.raises(ValueError, match="weight overflows"):
            evaluate(build_objective(name, fused=True), given_batch)


def random_batch(generator, lengths, scale, extreme):
    shape = (len(lengths), max(lengths) + 3)

    def normal(size):
        return size * torch.randn(shape, dtype=torch.float64, generator=generator)

    behavior = -1 - normal(0.3).abs()
    drift = normal(scale)
    if extreme:
        drift[:, 0] = 1e4 * torch.randn(shape[0], dtype=torch.float64, generator=generator).sign()
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(shape, generator=generator) < 0.9
    mask[:, 0] = True
    inputs = {
        "policy_logprobs": (behavior + drift).clamp(max=0),
        "behavior_logprobs": behavior - drift.clamp(min=0),
        "advantages": torch.randn(shape[0], dtype=torch.float64, generator=generator),
        "response_mask": mask,
        "rollout_logprobs": behavior + normal(0.1),
    }
    return {
        k: v.to(DEVICE, torch.float32 if v.is_floating_point() else None) for k, v in inputs.items()
    }


def test_triton_works_here():
    assert fused.triton_works(DEVICE)


@pytest.mark.parametrize("score", ["token", "path"])
def test_every_constraint_and_aggregation(score):
    aggregations = itertools.cycle(("response_mean", "token_mean", "response_sum", "token_sum"))
    weights = itertools.cycle(("token", "prefix_mean", "prefix_product"))
    given = batch(torch.float64, rollout=False)
    compared = set()
    for constraint in test_definitions.CONSTRAINTS.values():
        aggregation, weight = next(aggregations), next(weights)
        spec = ObjectiveSpec(
            weight=weight if score == "token" else "token",
            constraint=constraint,
            score=score,
            aggregation=aggregation,
            constant=3.7 if aggregation.endswith("sum") else 1.0,
        )
        if fused.covers(spec):
            compare(Objective(spec), given, 1e-11)
            compared.add(type(constraint))
    assert {PpoClip, HardGate} < compared and (Truncate in compared) == (score == "token")


def test_faults_are_found_by_the_kernel_too():
    given = batch(torch.float64)
    given["response_mask"][1, 2] = True
    position = int(given["response_mask"][1, :3].sum())
    given["policy_logprobs"][1, 2] = float("nan")
    with pytest.raises(ValueError, match=rf"policy_logprobs at sequence 1 .*position {position} "):
        policy_loss(build_objective("pnpo", fused=True), **given)


def test_what_it_does_not_cover_is_refused():
    objective = build_objective("gspo", fused=True)
    with pytest.raises(ValueError, match="does not cover"):
        policy_loss(objective, **batch(torch.float64))


def test_a_path_score_that_is_truncated_is_left_to_the_torch_path():
    # Its gradient is 0 beyond the bounds: 2 is clamped to 1.1 whatever the policy does.
    truncate = Truncate(low=0.1, high=0.1)
    spec = ObjectiveSpec(
        weight="token", constraint=truncate, score="path", aggregation="token_mean"
    )
    assert not fused.covers(spec)
    behavior = torch.tensor([[-2.0, -2.0]], dtype=torch.float64, device=DEVICE)
    drift = torch.tensor([[math.log(2.0), 0.0]], dtype=torch.float64, device=DEVICE)
    given = {
        "policy_logprobs": behavior + drift,
        "behavior_logprobs": behavior,
        "advantages": torch.ones(1, dtype=torch.float64, device=DEVICE),
        "response_mask": torch.ones(1, 2, dtype=torch.bool, device=DEVICE),
    }
    _, gradient, _ = evaluate(Objective(spec), given)
    assert gradient.tolist() == [[0.0, pytest.approx(-0.5)]]
