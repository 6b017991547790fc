"""Seconds of each data-parallel replica's own passes, up to where it waits for the others.

The ranks of a replica (tensor, context, pipeline) wait for each other in every layer, and so do all
ranks of experts that are divided among replicas: seconds can differ between whole replicas only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed.topology import Topology


class Pace:
    """Adds up the seconds of a model's passes on this rank, on CUDA by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # start and end of each update's passes

    def mark(self) -> None:
        """Mark the start of an update's passes, or their end, before a wait for other replicas."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def pop_seconds(self) -> float:
        """Return the seconds since the last call."""
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self._device.type != "cuda":
            return sum(end - start for start, end in pairs)
        torch.cuda.synchronize(self._device)
        return sum(start.elapsed_time(end) for start, end in pairs) / 1000


def gather_paces(paces: Iterable[Pace], *, topology: Topology) -> dict[tuple[int, ...], float]:
    """Return the seconds of each replica since the last call, by its ranks; collective over all."""
    table = torch.zeros(
        topology.dp_size, topology.world_size, dtype=torch.float64, device=topology.device
    )
    table[topology.dp_rank, topology.rank] = sum(pace.pop_seconds() for pace in paces)
    if topology.world_size > 1:
        dist.all_reduce(table)
    rows = table.tolist()
    return {tuple(n for n, x in enumerate(row) if x): max(row) for row in rows if any(row)}
