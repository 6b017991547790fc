"""Which of torch's ways of stepping Adam a device gets."""

import torch

from megatron_rl.actor.build import step_in_one_kernel
from megatron_rl.planning.pretended_device import CPU, CUDA, pretended


def adam(parameter):
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    return optimizer


def test_cuda_has_one_kernel_that_counts_on_the_device():
    with pretended(CUDA):
        parameter = torch.empty(8, device="cuda", requires_grad=True)
        optimizer = adam(parameter)
        step_in_one_kernel(optimizer, CUDA)
        assert optimizer.param_groups[0]["fused"]
        assert optimizer.state[parameter]["step"].is_cuda


def test_what_a_gpu_saved_is_stepped_as_ever_on_a_cpu():
    parameter = torch.ones(8, requires_grad=True)
    optimizer = adam(parameter)
    optimizer.param_groups[0]["fused"] = True  # as its checkpoint says
    step_in_one_kernel(optimizer, CPU)
    assert not optimizer.param_groups[0]["fused"]
    assert not optimizer.state[parameter]["step"].is_cuda
