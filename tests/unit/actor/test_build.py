"""Choice of torch's Adam implementation, and clipping."""

import pytest
import torch

from megatron_rl.actor.build import step_in_one_kernel
from megatron_rl.actor.training import _clip
from megatron_rl.apps.planning.fake_device import CUDA, fake_device


def adam(parameter):
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    return optimizer


def test_steps_are_counted_on_the_device():
    with fake_device(CUDA):
        parameter = torch.empty(8, device="cuda", requires_grad=True)
        optimizer = adam(parameter)
        step_in_one_kernel(optimizer)
        assert optimizer.param_groups[0]["fused"]
        assert optimizer.state[parameter]["step"].is_cuda


def test_state_saved_by_another_implementation_is_stepped_in_one_kernel():
    parameter = torch.ones(8, requires_grad=True)
    optimizer = adam(parameter)
    assert not optimizer.param_groups[0]["fused"]
    step_in_one_kernel(optimizer)
    assert optimizer.param_groups[0]["fused"]
    assert not optimizer.state[parameter]["step"].is_cuda


def test_gradients_are_scaled_to_the_largest_norm_and_never_up():
    trained, frozen = torch.zeros(3, requires_grad=True), torch.zeros(3)
    trained.grad = torch.tensor([3.0, 0.0, 4.0])
    _clip([trained, frozen], 10.0, 5.0)
    assert trained.grad.tolist() == [3.0, 0.0, 4.0]
    _clip([trained, frozen], 0.5, 5.0)
    assert trained.grad.tolist() == pytest.approx([0.3, 0.0, 0.4])
