"""Nothing between log-probabilities and gradient asks the device for a value.

Tensors on the meta device have no values: an `.item()`, a `nonzero` or a boolean index raises on
them, as on CUDA it would wait for the device.
"""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, Statistics, TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.types import Denominators

OPTIONS = {
    "kl": {"coefficient": 0.1},
    "entropy_coefficient": 0.01,
    "rollout_correction": {"level": "sequence"},
}


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_forward_backward_and_merging_never_read_value(name):
    options = {} if name == "oapl" else OPTIONS
    lengths = (4, 300, 12)
    layout = SequenceLayout(lengths, torch.zeros(sum(lengths), dtype=torch.bool, device="meta"))
    values = torch.zeros(sum(lengths), device="meta")
    policy = values.clone().requires_grad_()
    # What a whole minibatch decides is read once, before its first micro-batch.
    tokens = torch.tensor([0.1, 0.5]), torch.ones(2), torch.tensor([-1.0, -2.0])
    objective = build_objective(name, **options).resolve(MinibatchTokens.whole(*tokens))
    result = objective(
        TokenInputs(
            policy_logprobs=policy,
            behavior_logprobs=values,
            advantages=values,
            rollout_logprobs=values,
            reference_logprobs=values,
            entropy=values,
        ),
        layout=layout,
        denominators=Denominators(3.0, 300.0),
    )
    result.loss.sum().backward()
    merged = Statistics.empty("meta").merge(result.statistics).all_reduce(None)
    assert policy.grad.shape == policy.shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        merged.to_metrics()  # the one place that reads: here there is nothing to read
