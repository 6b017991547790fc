"""Exact gradients on a tree small enough to enumerate every response.

Three symbols, of which 0 ends the response, and at most four steps: 31 responses of lengths 1 to
4, behavior and policy two unrelated softmax tables. Expectations are finite sums, so equality is
to rounding.
"""

import math

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.objective import kl_penalty
from megatron_rl.objectives.spec import KlPenalty
from megatron_rl.types import Denominators
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
    assert len(task.tokens) == 31  # 1 + 2 + 4 ended after 1, 2, 3 and 8 * 3 at the horizon
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


@pytest.mark.parametrize("on_policy", [True, False])
def test_distillation_equals_divergence_at_generated_prefixes(setting, on_policy):
    """On policy it is the KL of whole responses, differentiated at fixed prefixes."""
    task, policy, behavior = setting
    behavior = policy if on_policy else behavior
    teacher = torch.randn(policy.shape, dtype=torch.float64, generator=torch.Generator())
    objective = build_objective(
        "local_surrogate",
        advantage_coefficient=0.0,
        kl={"coefficient": 2.0, "estimator": "reverse_kl"},
    )
    table = policy.clone().requires_grad_()

    def divergences():  # of each state
        log_p, log_q = (torch.log_softmax(x, dim=-1) for x in (table, teacher))
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    log_p, log_beta, log_q = (tree.token_logprobs(task, x) for x in (table, behavior, teacher))
    result = objective(
        TokenInputs(
            log_p.reshape(-1),
            log_beta.reshape(-1),
            task.rewards[:, None].expand(task.tokens.shape).reshape(-1),
            divergence=divergences()[task.states].reshape(-1),
        ),
        layout=SequenceLayout([task.tokens.shape[1]] * len(task.tokens), task.mask.reshape(-1)),
        denominators=Denominators(responses=1.0, tokens=1.0),
    )
    probability = log_beta.sum(dim=1).exp().detach()
    value = (probability[:, None] * result.loss.view(task.tokens.shape)).sum()
    (got,) = torch.autograd.grad(value, table)
    visited = torch.zeros(task.state_count, dtype=torch.float64)  # expected visits of each prefix
    weights = torch.where(task.mask, probability[:, None].detach(), 0)
    visited.index_add_(0, task.states.reshape(-1), weights.reshape(-1))
    (wanted,) = torch.autograd.grad(2 * (visited * divergences()).sum(), table)
    assert_exact(got, wanted)
    if on_policy:
        whole = (probability * (log_p - log_q).sum(dim=1)).sum()
        assert value.item() == pytest.approx(2 * whole.item(), rel=1e-12)


@pytest.fixture(scope="module")
def reuse():
    """Relative bias of each form at drifts 0, 1e-4 and 0.3, mean of four tasks."""
    table = {name: [] for name in tree.DISTILLED}
    for drift in (0.0, 1e-4, 0.3):
        sums = dict.fromkeys(tree.DISTILLED, 0.0)
        for seed in range(4):
            task = tree.make_task(vocabulary=3, horizon=4, ends=True, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            shape = (3, task.state_count, task.vocabulary)
            behavior, direction, teacher = torch.randn(
                shape, dtype=torch.float64, generator=generator
            )
            policy = behavior + drift * direction
            truth = tree.distillation_gradient(task, policy, teacher)
            given = {"policy": policy, "behavior": behavior, "teacher": teacher}
            for name in tree.DISTILLED:
                got = tree.distill(task, tree.distiller(name), **given).mean
                sums[name] += float((got - truth).norm() / truth.norm()) / 4
        for name, bias in sums.items():
            table[name].append(bias)
    return table


def test_every_form_of_distillation_is_exact_without_drift(reuse):
    assert all(biases[0] < 1e-13 for biases in reuse.values()), reuse


def test_prefix_product_is_exact_at_every_drift(reuse):
    for name in ("divergence, C_{t-1}", "advantage, C_t"):
        assert max(reuse[name]) < 1e-12


def test_prefix_weight_lowers_bias_of_reused_divergence(reuse):
    # To first order unweighted reuse misses S_{t-1} and w_{t-1} misses S_{t-1} (1 - 1/(t-1)).
    for plain, weighted in zip(*(reuse[n][1:] for n in list(tree.DISTILLED)[:2]), strict=True):
        assert 0 < weighted < plain
    # Of the sampled token alone, the unweighted advantage misses the action's ratio as well.
    for name in ("advantage, rho_t", "advantage, w_t"):
        assert 0 < reuse[name][1] < reuse["advantage"][1]
    # The divergence is the expectation of the advantage with the token's own ratio.
    assert reuse["advantage, rho_t"] == pytest.approx(reuse["divergence"], rel=1e-9, abs=1e-13)


def test_divergence_has_less_variance_than_its_sampled_advantage(setting):
    task, policy, behavior = setting
    teacher = torch.randn(policy.shape, dtype=torch.float64, generator=torch.Generator())
    given = {"policy": policy, "behavior": behavior, "teacher": teacher}
    for pair in (("divergence", "advantage, rho_t"), ("divergence, C_{t-1}", "advantage, C_t")):
        whole, sampled = (tree.distill(task, tree.distiller(name), **given) for name in pair)
        assert_exact(whole.mean, sampled.mean)
        assert whole.variance < sampled.variance


@pytest.mark.parametrize("kind", ["hard_gate", "truncate"])
def test_weighted_divergence_equals_double_loop_over_prefixes(kind):
    """Weights, gate and division as sums over Python floats; three tokens leave the bounds."""
    ratios = [[0.3, -0.5, 0.1, 0.2], [0.3, -0.62, -0.01]]
    low, high = 0.1, 0.12
    objective = build_objective(
        "pnpo",
        constraint={"kind": kind, "low": low, "high": high, "scale": "sqrt(L/t)"},
        advantage_coefficient=0.0,
        kl={"coefficient": 0.5, "estimator": "jsd", "weighted": True},
    )
    flat = torch.tensor([*ratios[0], *ratios[1]], dtype=torch.float64)
    divergence = torch.linspace(0.1, 2.0, 7, dtype=torch.float64, requires_grad=True)
    loss = objective(
        TokenInputs(flat - 1, flat * 0 - 1, torch.zeros_like(flat), divergence=divergence),
        layout=SequenceLayout([4, 3], torch.ones(7).bool()),
        denominators=Denominators(responses=2.0, tokens=7.0),
    ).loss  # fmt: skip
    wanted, changed = [], 0
    for row in ratios:
        for t in range(len(row)):  # t tokens come before
            weight = math.exp(sum(row[:t]) / t) if t else 1.0
            h = math.sqrt(len(row) / max(t, 1))
            inside = 1 - low * h <= weight <= 1 + high * h
            changed += not inside
            if not inside:
                clipped = min(max(weight, 1 - low * h), 1 + high * h)
                weight = clipped if kind == "truncate" else 0.0
            wanted.append(0.5 * weight / (2 * len(row)))
    assert changed == 3
    (got,) = torch.autograd.grad(loss.sum(), divergence)
    assert got.tolist() == pytest.approx(wanted, rel=1e-12)
    assert loss.tolist() == pytest.approx(
        [w * v for w, v in zip(wanted, divergence.tolist(), strict=True)], rel=1e-12
    )
