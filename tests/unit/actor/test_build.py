"""Choice of torch's Adam implementation by device."""

import torch

from megatron_rl.actor.build import step_in_one_kernel
from megatron_rl.apps.planning.fake_device import CPU, CUDA, fake_device


def adam(parameter):
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    return optimizer


def test_cuda_uses_fused_adam_with_device_step_counts():
    with fake_device(CUDA):
        parameter = torch.empty(8, device="cuda", requires_grad=True)
        optimizer = adam(parameter)
        step_in_one_kernel(optimizer, CUDA)
        assert optimizer.param_groups[0]["fused"]
        assert optimizer.state[parameter]["step"].is_cuda


def test_state_saved_on_cuda_uses_default_adam_on_cpu():
    parameter = torch.ones(8, requires_grad=True)
    optimizer = adam(parameter)
    optimizer.param_groups[0]["fused"] = True  # as in its checkpoint
    step_in_one_kernel(optimizer, CPU)
    assert not optimizer.param_groups[0]["fused"]
    assert not optimizer.state[parameter]["step"].is_cuda
