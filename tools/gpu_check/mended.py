"""Checks of three corrections that were made after the first check on a GPU."""

import time

import torch

from tools.gpu_check.row import DEVICE

ELEMENTS = 1 << 28 if DEVICE == "cuda" else 1 << 20  # of the digested tensor: 1 GiB in float32


def check_mended(row):
    """Check the digest on the device, one kernel for Adam, and the memory of a sleeping engine."""
    check_digest(row)
    check_adam(row)
    check_peak_memory(row)


def check_digest(row):
    """Compare the digest computed on the device with the host's, of tensors on the host."""
    from megatron_rl.actor.digest import digest_tensors

    tensor = torch.arange(ELEMENTS, dtype=torch.int32).view(torch.float32)
    answers, seconds = {}, {}
    for device in {"cpu", DEVICE}:
        start = time.perf_counter()
        answers[device] = digest_tensors([tensor], device=torch.device(device))
        seconds[device] = time.perf_counter() - start
        row.note(f"GB/s of the digest on {device}", tensor.nbytes / seconds[device] / 1e9)
    row.at_least("digest on the device as on the host", int(len(set(answers.values())) == 1), 1)


def check_adam(row):
    """Check that an optimizer step allocates no temporary as large as its parameters."""
    from megatron_rl.actor.build import step_in_one_kernel

    parameter = torch.nn.Parameter(torch.ones(ELEMENTS // 8, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    optimizer.step()  # creates the moments
    step_in_one_kernel(optimizer, parameter.device)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    optimizer.step()
    if DEVICE == "cuda":
        temporary = torch.cuda.max_memory_allocated() - before
        row.at_most("temporary memory of Adam, of a parameter", temporary / parameter.nbytes, 0.1)
    row.at_most("error of two steps of Adam", (1 - 2e-3 - parameter).abs().max().item(), 1e-4)


def check_peak_memory(row):
    """Check that the metric of peak memory leaves out what an engine has released."""
    from megatron_rl.telemetry.metrics import PeakMemory

    if DEVICE != "cuda":
        return  # the metric is then of resident memory
    engine = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    peak = PeakMemory(DEVICE)
    peak.reset()
    peak.count_without(engine.nbytes)
    own = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    row.at_most("bytes counted of a sleeping engine", peak.now() - own.nbytes, 1 << 20)
