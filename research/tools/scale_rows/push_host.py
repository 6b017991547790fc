"""Processor seconds of one rank's host in a weight push, without kernels and network."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import parameter_shapes
from megatron_rl.resharding.push_schedule import Frame, RankPlan, plan_for_rank
from megatron_rl.resharding.transfer import Ledger, Overwriting, Parcel
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen3_235b, qwen25_72b

TITLE = "The weight push: seconds of the host"
TEXT = """
What rank 0's host does in one push of the whole model, slices written directly, buckets of 512 MiB,
nodes of 8 ranks. The tensors have no values and the process group delivers nothing, so that neither
a kernel nor a network takes time: what is left is Python, torch's dispatcher and the plan. *Calls*
are those of torch's operators, views and messages included, and do not depend on the machine. CPU
seconds are the least of ten pushes after a first one with the same plan. In a *full check*, the
first push and every 50th of a run, every slice has a sum of its own; sums of tensors without values
are Python in torch, so its seconds overstate. `before` is commit 87852f9, with buckets of 64 MiB
and a call for each slice.

The seconds are of an idle machine on 2026-11-25. An idle one of 2026-11-24 was 2.5 times slower
(0.289, 0.287 and 0.031 s for the first, second and last layout); `before` was measured on such a
machine. Messages are handed to torch's process group without peers as a byte on the CPU, which it
takes in C++ as real groups do; it takes tensors without values in Python. Without that, on the
slower machine, these three took 0.284, 0.325 and 0.028 s, and those of commit a82cf41 0.421, 0.394
and 0.029 s: the least of several runs of both in turns. A full check of 235B is expensive because
ranks send slices of whole experts to eight ranks of every engine; slices of equal shape are summed
together.
"""
_BYTE = torch.zeros(1, dtype=torch.uint8)


@dataclass(kw_only=True)
class _HostOnly(Overwriting):
    """A transfer that waits for nothing.

    Its messages are sent as a byte on the CPU: torch's process group without peers takes these in
    C++, as real groups do, and tensors without values in Python.
    """

    def _parcels(self, frames: list[Frame], buffer: Tensor) -> list[Parcel]:
        parcels = super()._parcels(frames, buffer)
        for parcel in parcels:
            parcel.wire = _BYTE
        return parcels

    def _wait(self, number: int, work: list[Any]) -> None:
        del number, work


class _Calls(TorchDispatchMode):
    """Counts the calls of torch's operators."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _push(
    shape: ModelShape, actor: ActorLayout, engine: EngineLayout, plan: RankPlan, *, full: bool,
    mode: AbstractContextManager[Any] | None = None,
) -> float:  # fmt: skip
    """Push once from rank 0, on tensors without values, in the given mode; CPU seconds."""
    dtype, device = torch.bfloat16, torch.device("meta")
    parameters = {
        name: torch.empty(size, dtype=dtype, device=device)
        for name, size in parameter_shapes(actor.pieces(shape, rank=0)).items()
    }
    live = {
        name: torch.empty(size, dtype=dtype, device=device)
        for name, size in engine.parameter_shapes(shape, rank=0).items()
    }
    gc.collect()
    start = time.process_time()
    with mode or nullcontext():
        _HostOnly(
            plan=plan,
            parameters=parameters,
            dtype=dtype,
            device=device,
            ledger=Ledger(plan, full=full, dtype=dtype, device=device),
            time_limit=600.0,
            live=live,
        ).write()
    return time.process_time() - start


def rows() -> Iterator[Row]:
    """Yield the seconds of usual pushes and of a full check."""
    large, dense = qwen3_235b(), qwen25_72b()
    cases = (
        ("235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64), 3.97),
        ("235B", large, ActorLayout(4, 2, 1, 128, expert=64), EngineLayout(8, 1024), "not run"),
        (
            "235B", large, ActorLayout(8, 4, 1, 32, expert=64, expert_tensor=1),
            EngineLayout(8, 1024), "not run",
        ),
        (
            "235B", large, ActorLayout(8, 8, 1, 16, expert=64, expert_tensor=1),
            EngineLayout(8, 1024), "not run",
        ),
        ("72B", dense, ActorLayout(8, 4, 1, 32), EngineLayout(8, 1024), "not run"),
    )  # fmt: skip
    for model, shape, actor, engine, before in cases:
        plan = plan_for_rank(shape, actor, engine, rank=0, wire_elements=1 << 28, ranks_per_node=8)
        dist.init_process_group(
            "meta:fake,cpu:fake", store=FakeStore(), rank=0, world_size=actor.world_size
        )
        seconds, calls = [], []
        for full, pushes in ((False, 11), (True, 1)):
            each = [_push(shape, actor, engine, plan, full=full) for _ in range(pushes)]
            seconds.append(min(each[1:] or each))
            mode = _Calls()
            _push(shape, actor, engine, plan, full=full, mode=mode)
            calls.append(mode.count)
        dist.destroy_process_group()
        layout = f"{model} {str(actor)[6:]} -> {str(engine)[5:].partition(' x ')[0]}"
        ranks, whats = actor.world_size, ("a push", "a push with a full check")
        for what, now, then in zip(whats, seconds, (before, "not measured"), strict=True):
            yield Row(what, layout, ranks, then, now, "CPU s", "measured")
        for what, count in zip(whats, calls, strict=True):
            yield Row(what, layout, ranks, "not counted", count, "calls", "counted")
