"""The Triton kernel against the torch path; run by test_fused in a process of its own.

Triton decides at its import whether it interprets, so the variable must be set before that.
"""

import itertools

import pytest
import torch

from megatron_rl.objectives import NAMED, build_objective, fused, policy_loss
from megatron_rl.objectives.objective import Objective
from megatron_rl.objectives.spec import ObjectiveSpec
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


@pytest.mark.parametrize("name", ["pnpo", "grpo", "ctpo"])
def test_float32_agrees_to_its_rounding(name):
    compare(build_objective(name), batch(torch.float32, rollout=False), 2e-6)


def test_every_constraint_and_aggregation():
    constraints = [c for p, c in test_definitions.CONSTRAINTS.items() if p[0] not in ("tv", "none")]
    aggregations = itertools.cycle(("response_mean", "token_mean", "response_sum", "token_sum"))
    given = batch(torch.float64, rollout=False)
    weights = itertools.cycle(("token", "prefix_mean", "prefix_product"))
    for constraint, weight, aggregation in zip(constraints, weights, aggregations, strict=False):
        constant = 3.7 if aggregation.endswith("sum") else 1.0
        spec = ObjectiveSpec(
            weight=weight,
            constraint=constraint,
            score="token",
            aggregation=aggregation,
            constant=constant,
        )
        compare(Objective(spec), given, 1e-11)


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
