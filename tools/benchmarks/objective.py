"""Time, memory and traffic of a PNPO loss, forward and backward, over context-parallel sizes.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/objective.py

512 sequences of long-tailed lengths up to 16,384 in one pack. Implementations of the same loss:

  scan    this package: one all-gather of [sequences, 2] totals; all diagnostics
  gather  as scan, but every rank gathers all log-ratios and scans the whole pack
  padded  a plain torch loss on a [512, longest] rectangle, without diagnostics; under context
          parallelism every rank gathers all log-probs and fills the whole rectangle

and the scan and the gather of the prefix sums alone. On the CPU, ranks are gloo processes that
share the machine's cores: compare implementations within a row of cp, not cp sizes.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.sequence_statistics import Scan, Scanned, scan_together
from megatron_rl.objectives import TokenInputs, build_objective, weights
from megatron_rl.telemetry.peak_memory import PeakMemory
from megatron_rl.types import Denominators
from tests.ranks import run_ranks

SEQUENCES, LONGEST, ALIGNMENT = 512, 16_384, 16
REPEATS = 3


def gather_together(whole: SequenceLayout) -> Callable[..., list[Scanned]]:
    """Scans of the `whole` pack on every rank, as in other frameworks."""

    def scan(layout: SequenceLayout, *scans: Scan) -> list[Scanned]:
        """Gather each [T], scan it here, keep this rank's tokens."""
        results = scan_together(whole, *(s._replace(x=layout.gather(s.x)) for s in scans))
        return [result._replace(running=layout.shard(result.running)) for result in results]

    return scan


def make_lengths() -> list[int]:
    """Return long-tailed lengths with a median near 700, multiples of 2 * 8."""
    generator = torch.Generator().manual_seed(0)
    raw = 700 * torch.exp(1.1 * torch.randn(SEQUENCES, generator=generator))
    aligned = (raw / ALIGNMENT).ceil() * ALIGNMENT
    return aligned.clamp(ALIGNMENT, LONGEST).int().tolist()


def make_inputs(lengths: list[int], device: str) -> dict[str, Tensor]:
    """Return policy and behavior log-probs, advantages and mask of the whole pack; [T] each."""
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    behavior = -torch.rand(tokens, generator=generator)
    advantages = torch.randn(len(lengths), generator=generator)
    inputs = {
        "policy": behavior + 1e-3 * torch.randn(tokens, generator=generator),
        "behavior": behavior,
        "advantages": advantages.repeat_interleave(torch.tensor(lengths)),
        "mask": torch.rand(tokens, generator=generator) < 0.95,
    }
    return {name: x.to(device) for name, x in inputs.items()}


def packed_loss(layout: SequenceLayout, local: dict[str, Tensor], tokens: int) -> Callable:
    """Return a function that runs the objective forward and backward once."""
    objective = build_objective("pnpo")
    denominators = Denominators(responses=float(SEQUENCES), tokens=float(tokens))

    def run() -> None:
        policy = local["policy"].requires_grad_()
        policy.grad = None
        result = objective(
            TokenInputs(
                policy_logprobs=policy,
                behavior_logprobs=local["behavior"],
                advantages=local["advantages"],
            ),
            layout=layout,
            denominators=denominators,
        )
        result.loss.sum().backward()

    return run


def padded_loss(layout: SequenceLayout, inputs: dict[str, Tensor], lengths: list[int]) -> Callable:
    """Compute PNPO on a padded rectangle in plain torch, for comparison only.

    One process starts from the rectangle. With context parallelism every rank gathers all
    log-probs, computes the whole loss, and keeps its own tokens' gradients.
    """
    parts = {name: x.split(lengths) for name, x in inputs.items()}
    pad = torch.nn.utils.rnn.pad_sequence
    rectangle, behavior, advantages = (
        pad(parts[name], batch_first=True) for name in ("policy", "behavior", "advantages")
    )
    mask = pad([part.float() for part in parts["mask"]], batch_first=True)
    cells = torch.cat([torch.arange(n) + row * max(lengths) for row, n in enumerate(lengths)])
    cells = cells.to(mask.device)
    start = rectangle if layout.cp_size == 1 else layout.shard(inputs["policy"])

    def run() -> None:
        leaf = start.requires_grad_()
        leaf.grad = None
        policy = leaf
        if layout.cp_size > 1:
            policy = torch.zeros_like(mask).view(-1).scatter(0, cells, layout.gather(leaf))
            policy = policy.view_as(mask)
        position = mask.cumsum(1).clamp(min=1)
        length = mask.sum(1, keepdim=True).clamp(min=1)
        log_w = ((policy.detach() - behavior) * mask).cumsum(1) / position
        scale = (length / position).sqrt()
        keep = (log_w >= torch.log1p(-7e-4 * scale)) & (log_w <= torch.log1p(9.5e-4 * scale))
        coefficient = keep * log_w.exp() * advantages * mask
        # Every rank computes the total loss, and the gather's gradient sums over ranks.
        (-(coefficient * policy / length).sum() / SEQUENCES / layout.cp_size).backward()

    return run


def measure(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the best time of a few runs in milliseconds, and the peak memory increase in MiB."""
    run()  # builds the layout's tables, warms the allocator
    if device == "cuda":
        torch.cuda.synchronize()
    else:  # cached memory of the first run would hide the next run's peak
        ctypes.CDLL(None).malloc_trim(0)
    memory = PeakMemory(device)
    memory.reset()
    before, best = memory.now(), float("inf")
    for _ in range(REPEATS):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, (memory.peak() - before) / 2**20


def on_rank(rank: int, world_size: int, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Measure every implementation at context parallelism `world_size`."""
    lengths = make_lengths()
    inputs = make_inputs(lengths, device)
    group = dist.group.WORLD if world_size > 1 else None
    results, tokens = {}, sum(lengths)
    layout = SequenceLayout(
        lengths, inputs["mask"], cp_rank=rank, cp_size=world_size, cp_group=group
    )
    local = {key: layout.shard(x) for key, x in inputs.items() if key != "mask"}
    gap = local["policy"] - local["behavior"]
    ways = {"scan": scan_together}
    if world_size > 1:
        ways["gather"] = gather_together(SequenceLayout(lengths, inputs["mask"]))
    for name, scan in ways.items():
        results[f"{name}: prefix sums"] = measure(
            lambda scan=scan: scan(layout, Scan(gap))[0].running, device
        )
        with patch.object(weights, "scan_together", scan):
            results[f"{name}: loss"] = measure(packed_loss(layout, local, tokens), device)
    results["padded: loss"] = measure(padded_loss(layout, inputs, lengths), device)
    return results


def print_profile() -> None:
    """Profile one loss at cp 1 by torch operator."""
    lengths = make_lengths()
    inputs = make_inputs(lengths, "cpu")
    layout = SequenceLayout(lengths, inputs["mask"])
    local = {key: layout.shard(x) for key, x in inputs.items() if key != "mask"}
    run = packed_loss(layout, local, sum(lengths))
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def copy_bandwidth(device: str) -> float:
    """Measure the bytes per second of a large copy, read plus written."""
    x = torch.empty(2**26, device=device)
    milliseconds, _ = measure(x.clone, device)
    return 2 * x.numel() * 4 / (milliseconds / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--profile", action="store_true", help="Profile one loss on the CPU by operator."
    )
    arguments = parser.parse_args()
    if arguments.profile:
        print_profile()
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = make_lengths()
    tokens = sum(lengths)
    floor = tokens * (4 * 3 + 1 + 2 * 4)  # read 3 floats and a mask, write loss and gradient
    print(
        f"{device}, torch {torch.__version__}: {SEQUENCES} sequences, {tokens} tokens, longest "
        f"{max(lengths)}, padded rectangle {SEQUENCES * max(lengths)}"
    )
    seconds = floor / copy_bandwidth(device)
    print(f"byte floor {floor / 2**20:.0f} MiB, {seconds * 1e3:.1f} ms at copy bandwidth, over cp")
    print("\n| cp | way | ms | peak MiB per rank | sent per rank and scan |")
    print("|---|---|---|---|---|")
    for cp in arguments.cp:
        if cp == 1:
            ranks = [on_rank(0, 1, device)]
        else:
            ranks = run_ranks(on_rank, cp)
        for way in ranks[0]:
            slowest = max(rank[way][0] for rank in ranks)
            peak = max(rank[way][1] for rank in ranks)
            totals = way.startswith("scan")
            sent = 16 * SEQUENCES if totals else 4 * tokens // cp
            traffic = "0" if cp == 1 else f"{sent:,} B"
            print(f"| {cp} | {way} | {slowest:.1f} | {peak:.0f} | {traffic} |", flush=True)


if __name__ == "__main__":
    main()
