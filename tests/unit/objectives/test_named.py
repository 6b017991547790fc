"""PNPO and the balance of signs on numbers that can be followed by hand."""

import math

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.types import Denominators


def evaluate(name, log_ratios, advantages, mask, lengths, **overrides):
    """Loss, gradient and metrics in float64, with behavior log-probs of -1 everywhere."""
    mask = torch.tensor(mask).bool()
    layout = SequenceLayout(lengths, mask)
    behavior = torch.full((len(mask),), -1.0, dtype=torch.float64)
    policy = (behavior + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    result = build_objective(name, **overrides)(
        TokenInputs(
            policy_logprobs=policy,
            behavior_logprobs=behavior,
            advantages=torch.tensor(advantages, dtype=torch.float64)[layout.sequence_ids],
        ),
        layout=layout,
        denominators=Denominators(responses=float(len(lengths)), tokens=float(mask.sum())),
    )
    result.loss.sum().backward()
    return result.loss.detach(), policy.grad, result.statistics.to_metrics()


def test_pnpo_weights_gate_and_denominator():
    # One response of L = 4 with A = 2, l = (1e-3, 1e-3, -4e-3, 0): S = (1, 2, -2, -2) e-3 and
    # S_t / t = (1, 1, -2/3, -1/2) e-3. Upper bounds 1 + 9.5e-4 * (2, 1.414, 1.155, 1), lower
    # 1 - 7e-4 * (2, 1.414, 1.155, 1): everything stays. A padding token is not a decision.
    loss, grad, metrics = evaluate("pnpo", [1e-3, 1e-3, -4e-3, 0, 9], [2.0], [1, 1, 1, 1, 0], (5,))
    weights = [math.exp(s) for s in (1e-3, 1e-3, -2e-3 / 3, -5e-4)]
    assert grad.tolist() == pytest.approx([-2 * w / 4 for w in weights] + [0], rel=1e-12)
    assert metrics["gate/acceptance"] == 1
    # The third token rejected: S_3 / 3 = -1e-3 < log(1 - 7e-4 * 1.155) = -0.808e-3. The others
    # keep the denominator 4, and the fourth stays eligible: S_4 / 4 = 0.
    loss, grad, metrics = evaluate("pnpo", [1e-3, 1e-3, -5e-3, 3e-3], [2.0], [1, 1, 1, 1], (4,))
    assert grad.tolist() == pytest.approx(
        [-2 * math.exp(1e-3) / 4, -2 * math.exp(1e-3) / 4, 0, -2 / 4], rel=1e-12
    )
    assert metrics["gate/acceptance"] == 0.75
    # sg[M w A] log pi with log pi = -1 + l.
    assert loss[3].item() == pytest.approx(-(2 / 4) * (-1 + 3e-3), rel=1e-12)


def test_balanced_scales_wrong_answers_to_noise_of_right_ones():
    # Every token has beta = exp(-1): (1 - beta)^2 cancels. One right token with A = 1, four wrong
    # ones with A = -1: c = sqrt(1 / 4) = 0.5; with A = -0.25 it would be 2, and stays 1.
    objective = build_objective("balanced")
    for advantage, factor in ((-1.0, 0.5), (-0.25, 1.0)):
        advantages = torch.tensor([1.0] + 4 * [advantage])
        resolved = objective.resolve(
            MinibatchTokens.whole(torch.zeros(5), advantages, -torch.ones(5))
        )
        assert resolved.spec.negative == pytest.approx(factor)
        assert not resolved.spec.balanced
    # Without a right answer there is nothing to bring them down to: they are left out.
    assert (
        objective.resolve(
            MinibatchTokens.whole(torch.zeros(2), -torch.ones(2), -torch.ones(2))
        ).spec.negative
        == 0
    )
    with pytest.raises(ValueError, match="give one"):
        build_objective("balanced", negative=0.5)


def test_unknown_names_and_options_name_nearest():
    with pytest.raises(ValueError, match="did you mean 'pnpo'"):
        build_objective("pnpoo")
    with pytest.raises(ValueError, match="did you mean 'aggregation'"):
        build_objective("pnpo", agregation="token_mean")
    with pytest.raises(ValueError, match="did you mean 'low'"):
        build_objective("pnpo", constraint={"lo": 1e-3})
