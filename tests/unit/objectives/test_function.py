"""A user's own loss: the same numbers as named objectives, and clear errors."""

import re

import pytest
import torch

from megatron_rl.config import ConfigError, dump_config, parse_config
from megatron_rl.objectives import build_objective, policy_loss
from megatron_rl.objectives.function_spec import check_function

MODULE = "tests.unit.objectives.own_losses"
MINIMAL = {"model": {"path": "m"}, "data": {"train": "t.parquet"}}


def evaluate(objective):
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
        ("clip", "ppo", {"aggregation": "token_mean"}),
        ("clip", "ppo", {"aggregation": "response_sum", "constant": 7.0}),
        ("sequence_ratio", "gspo", {"aggregation": "response_mean", "constraint": "none"}),
        ("prefix_mean", "pnpo", {"aggregation": "response_mean", "constraint": "none"}),
    ],
)
def test_function_equals_named_objective(function, named, options):
    expected = evaluate(build_objective(named, **options))
    options.pop("constraint", None)
    loss, gradient, metrics = evaluate(
        build_objective("function", function=f"{MODULE}:{function}", **options)
    )
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-13)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-13, atol=0)
    assert metrics["loss/policy"] == pytest.approx(expected[0].item(), rel=1e-13)
    for name in ("ratio/kl_to_behavior", "ratio/prefix_mean_log_std", "tokens"):
        assert metrics[name] == expected[2][name]


def test_reduced_loss_is_rejected_with_shape_to_return():
    with pytest.raises(ValueError, match=r"own_losses:mean returned shape \(\); return one loss"):
        evaluate(build_objective("function", function=f"{MODULE}:mean"))


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


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"function": "my_losses"}, "function is 'my_losses': it must be module:function, such as"),
        ({"name": "gspo", "function": "m:f"}, "objective.name=gspo and objective.function=m:f are"),
        ("function", "objective.function needs 'function'"),
        *(
            ({"function": "m:f", option: value}, f"objective.{option} cannot be combined with")
            for option, value in (
                ("kl", {"coefficient": 0.1}),
                ("entropy_coefficient", 0.1),
                ("rollout_correction", {}),
                ("constraint", {"low": 0.1}),
            )
        ),
        ({"function": "m:f", "constant": 2.0}, "use response_sum or token_sum"),
    ],
)
def test_config_rejects_options_that_need_more(objective, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(MINIMAL | {"objective": objective})


def test_config_with_function_reads_back_unchanged():
    import yaml

    config = parse_config(MINIMAL | {"objective": {"function": "my_losses:loss"}})
    assert config.objective.name == "function"
    assert parse_config(yaml.safe_load(dump_config(config))) == config
