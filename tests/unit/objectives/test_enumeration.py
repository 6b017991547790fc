"""Exact gradients on a tree small enough to enumerate every response.

Three symbols, of which 0 ends the response, and at most four steps: 31 responses of lengths 1 to
4, behavior and policy two unrelated softmax tables. Expectations are finite sums, so equality is
to rounding.
"""

import pytest
import torch

from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.objective import kl_penalty
from megatron_rl.objectives.spec import KlPenalty
from tests.unit.objectives import response_tree as tree


@pytest.fixture
def setting():
    task = tree.make_task(vocabulary=3, horizon=4, ends=True, seed=0)
    generator = torch.Generator().manual_seed(1)
    shape = (task.state_count, task.vocabulary)
    behavior = torch.randn(shape, dtype=torch.float64, generator=generator)
    policy = behavior + 0.7 * torch.randn(shape, dtype=torch.float64, generator=generator)
    return task, policy, behavior


def gradient(setting, objective, advantages):
    task, policy, behavior = setting
    return tree.expected_gradient(
        task, objective, policy=policy, behavior=behavior, advantages=advantages
    )


def assert_exact(got, wanted):
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


def test_enumeration_is_complete(setting):
    task, policy, _ = setting
    assert len(task.tokens) == 31  # 1 + 2 + 4 ended after 1, 2, 3 and 8 * 3 at the horizon
    assert float(tree.token_logprobs(task, policy).sum(1).exp().sum()) == pytest.approx(1)


def test_exact_prefix_score_with_behavior_advantages_is_grad_j(setting):
    task, policy, behavior = setting
    advantages = tree.position_advantages(task, behavior)
    got = gradient(setting, build_objective("exact_prefix_score"), advantages)
    assert_exact(got, tree.true_gradient(task, policy))


def test_exact_token_score_with_policy_advantages_is_grad_j(setting):
    task, policy, _ = setting
    advantages = tree.position_advantages(task, policy)
    got = gradient(setting, build_objective("exact_token_score"), advantages)
    assert_exact(got, tree.true_gradient(task, policy))


def test_token_score_needs_advantages_of_policy(setting):
    # With the behavior's it is the mixture that the paper warns of. The prefix score takes either:
    # the later A^theta have expectation 0 under the policy, which leaves C_k A^theta_k z_k.
    task, policy, behavior = setting
    truth = tree.true_gradient(task, policy)
    advantages = tree.position_advantages(task, behavior)
    got = gradient(setting, build_objective("exact_token_score"), advantages)
    assert float((got - truth).norm() / truth.norm()) > 0.05
    advantages = tree.position_advantages(task, policy)
    assert_exact(gradient(setting, build_objective("exact_prefix_score"), advantages), truth)


def test_whole_response_importance_sampling_is_exact_with_outcome_advantages(setting):
    # E_beta[C_L (R - b) sum_t z_t] = grad J for every constant b.
    task, policy, _ = setting
    advantages = (task.rewards - 0.3)[:, None].expand(task.tokens.shape)
    got = gradient(setting, tree.weight_alone("sequence_product"), advantages)
    assert_exact(got, tree.true_gradient(task, policy))


@pytest.mark.parametrize("name", ["local_surrogate", "exact_prefix_score", "exact_token_score"])
def test_at_behavior_policy_every_unconstrained_form_is_exact(setting, name):
    task, _, behavior = setting
    same = (task, behavior, behavior)
    advantages = tree.position_advantages(task, behavior)
    assert_exact(
        gradient(same, build_objective(name), advantages), tree.true_gradient(task, behavior)
    )


def test_local_surrogate_is_biased_away_from_behavior_policy(setting):
    task, policy, behavior = setting
    got = gradient(
        setting, build_objective("local_surrogate"), tree.position_advantages(task, behavior)
    )
    truth = tree.true_gradient(task, policy)
    assert float((got - truth).norm() / truth.norm()) > 0.05


@pytest.mark.parametrize("name", ["pnpo", "gspo", "grpo", "ctpo", "minpro"])
def test_first_order_bias_vanishes_with_drift(name):
    # At drift 0 all weights are 1: on fixed lengths each is grad J. At 1e-6 the bias is of the
    # order of the drift, and nothing is gated or clipped.
    task = tree.make_task(vocabulary=3, horizon=4, ends=False, seed=3)
    generator = torch.Generator().manual_seed(4)
    shape = (task.state_count, task.vocabulary)
    behavior = torch.randn(shape, dtype=torch.float64, generator=generator)
    direction = torch.randn(shape, dtype=torch.float64, generator=generator)
    objective = build_objective(name)
    assert tree.relative_bias(task, objective, behavior, behavior) < 1e-12
    assert tree.relative_bias(task, objective, behavior + 1e-6 * direction, behavior) < 1e-5


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalties_have_gradient_of_what_they_estimate(estimator):
    # One state, four actions: sum_a beta(a) grad(rho k) against the divergence differentiated.
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    behavior, reference = torch.log_softmax(logits[1:], dim=-1)

    table = logits[0].clone().requires_grad_()
    penalty = kl_penalty(
        KlPenalty(coefficient=2.0, estimator=estimator),
        TokenInputs(
            torch.log_softmax(table, dim=-1),
            behavior,
            torch.zeros_like(behavior),
            reference_logprobs=reference,
        ),
    )
    value = (behavior.exp() * penalty).sum()
    (got,) = torch.autograd.grad(value, table)

    table = logits[0].clone().requires_grad_()
    policy = torch.log_softmax(table, dim=-1)
    gap = policy - reference
    # k1 and k3 estimate KL(pi || pi_ref); k2 its second-order neighbour E_pi[(log q)^2] / 2.
    divergence = (policy.exp() * (gap.square() / 2 if estimator == "k2" else gap)).sum()
    (wanted,) = torch.autograd.grad(2 * divergence, table)
    assert value.item() == pytest.approx(2 * divergence.item(), rel=1e-12)
    assert_exact(got, wanted)
