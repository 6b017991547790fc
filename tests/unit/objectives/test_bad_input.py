"""Values and configurations that cannot be used: one ValueError that names value and place."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.advantages import group_relative_advantages
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, TokenInputs, build_objective, policy_loss
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.types import Denominators


def arguments(**changes):
    """Two responses of up to 4 positions; response 1 has its first decision at position index 1."""
    given = {
        "policy_logprobs": torch.full((2, 4), -1.0),
        "behavior_logprobs": torch.full((2, 4), -1.1),
        "advantages": torch.tensor([1.0, -1.0]),
        "response_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool(),
    }
    for name, change in changes.items():
        if isinstance(change, tuple):
            row, column, value = change
            given[name] = given[name].clone()
            given[name][row, column] = value
        else:
            given[name] = change
    return given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Index 2 of row 1 is its second decision.
        ({"policy_logprobs": (1, 2, math.nan)}, "policy_logprobs at sequence 1 .*position 2 "),
        ({"policy_logprobs": (0, 0, -math.inf)}, "policy_logprobs at sequence 0 .*position 1 "),
        ({"behavior_logprobs": (1, 3, math.nan)}, "behavior_logprobs at sequence 1 .*position 3 "),
        ({"behavior_logprobs": (0, 1, 0.5)}, "sequence 0 .*position 2 .*is above 0"),
        ({"advantages": torch.tensor([1.0, math.nan])}, "advantages at sequence 1 .*position 1 "),
        ({"advantages": torch.zeros(3)}, r"advantages has shape \(3,\): it must be \(2, 4\) or"),
        ({"behavior_logprobs": torch.zeros(2, 3)}, r"behavior_logprobs has shape \(2, 3\)"),
        ({"response_mask": torch.zeros(2, 4).bool()}, "False everywhere"),
        ({"response_mask": torch.ones(2, 5).bool()}, r"response_mask has shape \(2, 5\)"),
        ({"response_mask": torch.full((2, 4), 0.5)}, "values other than 0 and 1"),
        ({"policy_logprobs": torch.zeros(8)}, r"must be \[B, T\]"),
        ({"rollout_logprobs": torch.full((2, 4), math.nan)}, "rollout_logprobs at sequence 0"),
        ({"entropy": torch.full((2, 4), math.inf)}, "entropy at sequence 0"),
    ],
)
def test_values_are_named_with_their_place(changes, message):
    with pytest.raises(ValueError, match=message):
        policy_loss("pnpo", **arguments(**changes))


def test_masked_values_may_be_anything():
    clean, metrics = policy_loss("pnpo", **arguments())
    rubbish = arguments(policy_logprobs=(0, 3, math.nan), behavior_logprobs=(1, 0, math.inf))
    loss, same_metrics = policy_loss("pnpo", **rubbish)
    assert loss == clean
    assert same_metrics == metrics


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_impossible_token_is_named_unless_masked(name):
    # A log-prob of -inf at position 1 of response 1: its weight is infinite or 0, rejected or not.
    given = arguments(rollout_logprobs=torch.full((2, 4), -1.2))
    wanted, _ = policy_loss(name, **given)
    for field in ("policy_logprobs", "behavior_logprobs", "rollout_logprobs"):
        changed = given | {field: given[field].clone()}
        changed[field][0, 3] = changed[field][1, 0] = -math.inf  # both off the mask
        assert policy_loss(name, **changed)[0] == wanted
        changed[field][1, 1] = -math.inf
        with pytest.raises(ValueError, match=rf"{field} at sequence 1 .*position 1 .*not finite"):
            policy_loss(name, **changed)


def test_weight_that_overflows_is_error_not_infinity():
    far = arguments(behavior_logprobs=torch.full((2, 4), -1e4))
    with pytest.raises(ValueError, match=r"sequence 0 .*position 1 .*weight overflows"):
        policy_loss("local_surrogate", **far)
    # With a bound in reach nothing overflows: the token is rejected or clipped.
    for name in ("pnpo", "grpo", "cispo", "sao"):
        loss, _ = policy_loss(name, **far)
        assert math.isfinite(loss)


def test_batch_constraint_is_resolved_first():
    layout = SequenceLayout((2,), torch.ones(2).bool())
    inputs = TokenInputs(torch.zeros(2), torch.zeros(2), torch.ones(2))
    objective = build_objective("m2po")
    for unfitted in (objective, build_objective("balanced")):
        with pytest.raises(ValueError, match=r"give this objective's resolve\(\)"):
            unfitted(inputs, layout=layout, denominators=Denominators(1.0, 2.0))
    resolved = objective.resolve(
        MinibatchTokens.whole(torch.tensor([0.1, 0.3]), torch.ones(2), torch.zeros(2))
    )
    # (0.01 + 0.09) / 2 is above 0.04: the larger goes, and the gate lies halfway between the two.
    assert resolved.spec.constraint.high == pytest.approx(0.2)


def test_numbers_in_yaml_text_are_numbers():
    # YAML 1.1 reads 7e-4 as text.
    objective = build_objective("pnpo", constraint={"low": "7e-4"})
    assert objective.spec.constraint.low == 7e-4
    assert objective == build_objective("pnpo")


def test_options_need_their_inputs_and_denominators_their_numbers():
    layout = SequenceLayout((2,), torch.ones(2).bool())
    inputs = TokenInputs(torch.zeros(2), torch.zeros(2), torch.ones(2))
    given = {"layout": layout, "denominators": Denominators(1.0, 2.0)}
    for option, missing in (
        ({"kl": {"coefficient": 0.1}}, "reference_logprobs"),
        ({"entropy_coefficient": 0.1}, "entropy"),
        ({"rollout_correction": {}}, "rollout_logprobs"),
    ):
        with pytest.raises(ValueError, match=f"{missing} is missing, but an option"):
            build_objective("pnpo", **option)(inputs, **given)
    with pytest.raises(ValueError, match=r"denominators\.tokens is 0\.0"):
        build_objective("pnpo")(inputs, **given | {"denominators": Denominators(1.0, 0.0)})
    with pytest.raises(ValueError, match=r"policy_logprobs has shape \(3,\)"):
        build_objective("pnpo")(replace(inputs, policy_logprobs=torch.zeros(3)), **given)


def test_rewards_must_be_floating_point_numbers():
    # The mean of integers is an error of torch that names neither the rewards nor the remedy.
    with pytest.raises(ValueError, match=r"rewards are torch\.int64"):
        group_relative_advantages(torch.tensor([[1, 0]]))
