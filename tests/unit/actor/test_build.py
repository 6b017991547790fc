"""Choice of torch's Adam implementation."""

import torch

from megatron_rl.actor.build import step_in_one_kernel
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
