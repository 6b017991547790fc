"""Optional terms, OAPL and a user's own loss, on numbers worked out by hand."""

import math
import re

import pytest
import torch

from megatron_rl.config import dump_config, parse_config
from megatron_rl.objectives import build_objective, policy_loss
from megatron_rl.objectives.spec import check_function


def one_row(log_ratios, *, advantage=1.0, **more):
    log_ratios = torch.tensor([log_ratios], dtype=torch.float64)
    behavior = torch.full_like(log_ratios, -1.0)
    return {
        "policy_logprobs": (behavior + log_ratios).requires_grad_(),
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "response_mask": torch.ones_like(log_ratios).bool(),
        **more,
    }


def evaluate(objective, given):
    name, overrides = objective if isinstance(objective, tuple) else (objective, {})
    loss, metrics = policy_loss(build_objective(name, **overrides), **given)
    (gradient,) = torch.autograd.grad(loss, given["policy_logprobs"])
    return loss.item(), gradient[0].tolist(), metrics


def test_kl_k3_by_hand():
    # One token, A = 0, ratio e^0.2, reference 0.3 above the policy: q = e^0.3.
    given = one_row([0.2], advantage=0.0)
    given["reference_logprobs"] = given["policy_logprobs"].detach() + 0.3
    loss, gradient, metrics = evaluate(("grpo", {"kl": {"coefficient": 0.1}}), given)
    k3 = math.exp(0.3) - 1 - 0.3
    assert loss == pytest.approx(0.1 * math.exp(0.2) * k3, rel=1e-12)
    # d/dlog pi of rho (q - 1 - log q) = rho (q - 1 - log q) + rho (1 - q) = -rho log q.
    assert gradient == pytest.approx([-0.1 * math.exp(0.2) * 0.3], rel=1e-12)
    assert metrics["loss/kl"] == pytest.approx(loss)


def test_entropy_bonus_lowers_loss_by_mean_entropy():
    given = one_row([0.0, 0.0], advantage=0.0)
    entropy = torch.tensor([[1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss_with_entropy(given, entropy)
    assert loss.item() == pytest.approx(-0.01 * 2.0)
    assert torch.autograd.grad(loss, entropy)[0].tolist() == [[-0.005, -0.005]]
    assert metrics["entropy"] == 2.0


def policy_loss_with_entropy(given, entropy):
    return policy_loss(build_objective("pnpo", entropy_coefficient=0.01), **given, entropy=entropy)


@pytest.mark.parametrize(
    ("correction", "factors"),
    # behavior - rollout = log 3, log 1/3, 0; product 1, geometric mean 1.
    [
        ({}, [2.0, 1 / 3, 1.0]),
        ({"low": 0.5}, [2.0, 0.5, 1.0]),
        ({"mode": "mask", "low": 0.5, "high": 5.0}, [3.0, 0.0, 1.0]),
        ({"level": "sequence"}, [1.0, 1.0, 1.0]),
        ({"level": "sequence_mean", "mode": "mask", "low": 1.5}, [0.0, 0.0, 0.0]),
    ],
)
def test_rollout_correction_scales_each_token(correction, factors):
    given = one_row([0.0, 0.0, 0.0])
    gaps = torch.tensor([[math.log(3), -math.log(3), 0.0]], dtype=torch.float64)
    given["rollout_logprobs"] = given["behavior_logprobs"] - gaps
    _, gradient, metrics = evaluate(("pnpo", {"rollout_correction": correction}), given)
    assert gradient == pytest.approx([-f / 3 for f in factors], rel=1e-12)
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(math.log(3))
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(2 * math.log(3) / 3)


def test_oapl_is_squared_error_of_response():
    # beta 2, S_L = 0.1 + 0.3: (0.8 - 0.5)^2, and d/dl_k = 2 * 2 * 0.3 for both tokens.
    loss, gradient, _ = evaluate(("oapl", {"beta": 2.0}), one_row([0.1, 0.3], advantage=0.5))
    assert loss == pytest.approx(0.09, rel=1e-12)
    assert gradient == pytest.approx([1.2, 1.2], rel=1e-12)


@pytest.mark.parametrize(
    ("gradient", "advantage"),
    [("detached", 1.0), ("through_weight", 1.0), ("through_weight", -1.0)],
)
def test_token_dropped_by_icepop_may_have_any_ratio(gradient, advantage):
    # rho_2 = e^1000 is infinite, and with A < 0 no bound of icepop's is above it; but the engine
    # disagrees by e^3 > 5 there, so that the token's term is 0. A term of inf * 0 would be nan.
    behavior = torch.tensor([[-1.0, -1001.0, -1.0]])
    policy = torch.tensor([[-1.1, -1.0, -0.9]], requires_grad=True)
    given = {
        "policy_logprobs": policy,
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([advantage]),
        "response_mask": torch.ones(1, 3).bool(),
        "rollout_logprobs": behavior - torch.tensor([[0.0, 3.0, 0.0]]),
    }
    objective = build_objective("icepop", gradient=gradient)
    loss, _ = policy_loss(objective, **given)
    (got,) = torch.autograd.grad(loss, policy)
    ratios = [math.exp(-0.1), 0.0, math.exp(0.1)]
    wanted = [-advantage * ratio / 3 for ratio in ratios]
    assert got[0].tolist() == pytest.approx(wanted, rel=1e-5)
    score = [1, 1, 1] if gradient == "through_weight" else policy[0].tolist()
    assert loss.item() == pytest.approx(
        sum(w * s for w, s in zip(wanted, score, strict=True)), rel=1e-5
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("policy", "behavior", "reference"),
    [
        (-1.0, -1001.0, -1.0),  # rho = e^1000 overflows, and pi = pi_ref: a penalty of 0
        (-1000.0, -3.0, -1.0),  # rho = 0, and q = e^999 overflows: rho q = e^2
    ],
)
def test_kl_penalty_at_extreme_ratio(estimator, policy, behavior, reference):
    options = {"kl": {"coefficient": 0.5, "estimator": estimator}}
    table = torch.tensor([[policy]], requires_grad=True)
    loss, metrics = policy_loss(
        build_objective("grpo", **options),
        policy_logprobs=table,
        behavior_logprobs=torch.tensor([[behavior]]),
        reference_logprobs=torch.tensor([[reference]]),
        advantages=torch.zeros(1),
        response_mask=torch.ones(1, 1).bool(),
    )
    # k3: rho (q - 1 - log q) = pi_ref / pi_beta - rho (1 + log q), here e^2 - 0.
    wanted = 0.5 * math.exp(2) if estimator == "k3" and policy < behavior else 0.0
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert metrics.get("loss/kl", 0.0) == pytest.approx(wanted, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, table)
    assert math.isfinite(gradient.item())
    if estimator != "k1":  # whose gradient, rho, is beyond float32 in the first case
        assert gradient.item() == 0


@pytest.mark.parametrize(
    ("overrides", "log_ratio", "named"),
    [
        # A reference 800 above the policy: e^800 is beyond float64; clipped GRPO itself is not.
        ({"kl": {"coefficient": 1e-3}}, 0.0, "objective.kl at sequence 0 .* k1 and k2 grow more"),
        ({"entropy_coefficient": 1e308}, 0.0, "objective.entropy_coefficient at sequence 0 "),
        ({"kl": {"coefficient": 1.0, "estimator": "k1"}}, 800.0,
         "objective.kl at sequence 0 "),
        ({"constraint": {"kind": "none"}}, 800.0, "loss at sequence 0 .* weight overflows"),
    ],
)  # fmt: skip
def test_term_that_overflows_is_named(overrides, log_ratio, named):
    given = one_row([log_ratio])
    given["entropy"] = torch.full((1, 1), 1e3, dtype=torch.float64)
    given["reference_logprobs"] = given["policy_logprobs"].detach() + 800.0
    with pytest.raises(ValueError, match=named):
        policy_loss(build_objective("grpo", **overrides), **given)


def test_k3_is_continuous_where_its_form_changes():
    # rho k3 in two forms that meet at log q = 40; e^-35 keeps the product within float64.
    losses = []
    for log_q in (40 - 1e-9, 40 + 1e-9):
        table = torch.tensor([[-log_q - 1]], dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(
            build_objective("grpo", kl={"coefficient": 1.0}),
            policy_logprobs=table,
            behavior_logprobs=torch.full((1, 1), -6.0, dtype=torch.float64),
            reference_logprobs=torch.full((1, 1), -1.0, dtype=torch.float64),
            advantages=torch.zeros(1),
            response_mask=torch.ones(1, 1).bool(),
        )
        losses.append([loss.item(), *torch.autograd.grad(loss, table)[0][0].tolist()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    assert losses[1][0] == pytest.approx(math.exp(5), rel=1e-6)


MODULE = "tests.unit.objectives.own_losses"
MINIMAL = {"model": {"path": "m"}, "data": {"train": "t.parquet"}}


def evaluate_function(objective):
    """Loss, gradient and metrics of random responses with holes in the mask."""
    generator = torch.Generator().manual_seed(5)
    behavior = -1 - torch.rand(4, 9, generator=generator, dtype=torch.float64)
    drift = 0.3 * torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.8
    policy = torch.where(mask, behavior + drift, torch.nan).requires_grad_()
    loss, metrics = policy_loss(
        objective,
        policy_logprobs=policy,
        behavior_logprobs=behavior,
        advantages=torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64),
        response_mask=mask,
    )
    loss.backward()
    return loss.detach(), policy.grad, metrics


@pytest.mark.parametrize(
    ("function", "named", "options"),
    [
        ("clip", "ppo", {"aggregation": "response_sum", "constant": 7.0}),
        ("sequence_ratio", "gspo", {"aggregation": "response_mean", "constraint": "none"}),
        ("prefix_mean", "pnpo", {"aggregation": "response_mean", "constraint": "none"}),
    ],
)
def test_function_equals_named_objective(function, named, options):
    expected = evaluate_function(build_objective(named, **options))
    options.pop("constraint", None)
    loss, gradient, metrics = evaluate_function(
        build_objective("function", function=f"{MODULE}:{function}", **options)
    )
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-13)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-13, atol=0)
    assert metrics["loss/policy"] == pytest.approx(expected[0].item(), rel=1e-13)
    for name in ("ratio/kl_to_behavior", "ratio/prefix_mean_log_std", "tokens"):
        assert metrics[name] == expected[2][name]


def test_reduced_loss_is_rejected_with_shape_to_return():
    with pytest.raises(ValueError, match=r"own_losses:mean returned shape \(\); return one loss"):
        evaluate_function(build_objective("function", function=f"{MODULE}:mean"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:loss", "there is no module nowhere; start in the folder that contains it"),
        (f"{MODULE}:lose", "has no function lose; it has clip, sequence_ratio, prefix_mean"),
        (f"{MODULE}:four", "takes 4 arguments; it must take 5: policy_logprobs, behavior"),
    ],
)
def test_check_function_names_fix(name, message):
    with pytest.raises(ValueError, match=re.escape(f"objective.function={name}")) as error:
        check_function(name)
    assert message in str(error.value)


def test_config_with_function_reads_back_unchanged():
    import yaml

    config = parse_config(MINIMAL | {"objective": {"function": "my_losses:loss"}})
    assert config.objective.name == "function"
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_missing_divergence_names_its_option():
    objective = build_objective("grpo", kl={"coefficient": 1.0, "estimator": "jsd"})
    zeros = torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"divergence is missing, but .* estimator='jsd'"):
        policy_loss(
            objective, policy_logprobs=zeros, behavior_logprobs=zeros,
            advantages=zeros, response_mask=zeros == 0,
        )  # fmt: skip


def test_teacher_as_advantage_by_hand():
    # A_t = 0.5 * A + 2 (log q - log pi): 0.5 + 2 * 0.3 = 1.1 and 0.5 + 2 * -0.4 = -0.3, both
    # constants. Token weights detached: -rho_t A_t / 2 tokens by log pi.
    given = one_row([0.1, -0.2])
    policy = given["policy_logprobs"].detach()
    given["reference_logprobs"] = policy + torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    kl = {"coefficient": 2.0, "estimator": "advantage"}
    options = {"constraint": {"kind": "none"}, "gradient": "detached", "kl": kl}
    loss, gradient, metrics = evaluate(("grpo", {"advantage_coefficient": 0.5, **options}), given)
    wanted = [-math.exp(0.1) * 1.1 / 2, math.exp(-0.2) * 0.3 / 2]
    assert gradient == pytest.approx(wanted, rel=1e-12)
    assert metrics["ratio/log_to_reference_mean"] == pytest.approx((-0.3 + 0.4) / 2)
    assert "loss/kl" not in metrics
    assert loss == pytest.approx(
        sum(w * p for w, p in zip(wanted, policy[0].tolist(), strict=True)), rel=1e-12
    )
