"""The named objective is the paper's equation: loss and gradient, on random batches."""

import inspect

import pytest
import torch

from megatron_rl.objectives import NAMED, pnpo_loss, policy_loss
from megatron_rl.objectives.spec import HardGate
from tests.unit.objectives.mutate import mutated


def both(seed, *, scale=6e-3):
    """(loss, gradient) of the equation and of the named objective, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 60)
    behavior = -torch.rand(shape, dtype=torch.float64, generator=generator) - 0.1
    drift = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 0] = True
    advantages = torch.randn(5, dtype=torch.float64, generator=generator)
    results = []
    for compute in (
        pnpo_loss,
        lambda policy, behavior, advantages, mask: policy_loss(
            "pnpo",
            policy_logprobs=policy,
            behavior_logprobs=behavior,
            advantages=advantages,
            response_mask=mask,
        )[0],
    ):
        policy = (behavior + drift).requires_grad_()
        loss = compute(policy, behavior, advantages, mask)
        results.append((loss.item(), torch.autograd.grad(loss, policy)[0]))
    return results


def assert_equal(seed):
    (loss, gradient), (named_loss, named_gradient) = both(seed)
    accepted = (gradient != 0).double().mean()
    assert 0.2 < accepted < 0.6, "the gate must do something here"
    assert named_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(named_gradient, gradient, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize("seed", range(2))
def test_named_objective_equals_equation(seed):
    assert_equal(seed)


def test_pnpo_objectives_have_same_tolerances():
    options = inspect.signature(pnpo_loss).parameters
    wanted = HardGate(low=options["low"].default, high=options["high"].default, scale="sqrt(L/t)")
    assert NAMED["pnpo"].constraint == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ t)  #", "/ L)  #"),
        ("torch.sqrt(L / t)", "torch.sqrt(t / L)"),
        ("(M * w", "(w"),
        ("(score / L)", "(score / M.sum(dim=1, keepdim=True))"),
        (".detach()", ""),
    ],
)
def test_another_equation_would_be_noticed(old, new):
    with mutated(pnpo_loss, old, new), pytest.raises(AssertionError):
        assert_equal(0)
