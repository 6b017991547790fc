"""Operations of host and device in every micro-batch and pack, at any number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.actor.reference import PIECE
from megatron_rl.actor.rotary import PackRotation, build_rotation
from megatron_rl.apps.planning.dry_run import DryRun, dry_run_rank
from megatron_rl.apps.planning.models import write_config_json
from megatron_rl.config import parse_config
from megatron_rl.distributed.chunk_scan import prefix_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.models.shape import ModelShape
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen25_72b

TITLE = "Every micro-batch: hops, scans, rotation, reference policy"
TEXT = """
Operations of torch in one differentiated prefix sum over a pack, each at least one kernel; bytes of
cosines and sines, or of positions, that a prepared pack keeps for heads of size 128 in bfloat16;
messages that a middle stage sends and the reads that make its host wait for the device, in a dry
run of one update with four micro-batches (72B, 8 layers); largest temporary memory on the device
while the reference policy is swapped (of these 72B). `before` is commit 4c2004c, by the same
programs. Shapes that a stage sends ahead are messages of 24 bytes.
"""
LENGTH = 300
BEFORE = {4: 75, 64: 195, 256: 579, 410: 887}  # operations by sequences


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def _scan_operations(sequences: int) -> int:
    lengths = [LENGTH - index % 7 for index in range(sequences)]
    layout = SequenceLayout(lengths, torch.ones(sum(lengths)))
    x = torch.randn(sum(lengths), requires_grad=True)
    prefix_sum(layout, x)  # the layout's tables are computed once
    with _Operations() as operations:
        torch.autograd.grad(prefix_sum(layout, x), x, torch.ones(sum(lengths)))
    return operations.count


def _rotation_bytes(shape: ModelShape) -> float:
    positions = torch.arange(1024)
    tables = build_rotation(positions, shape, dtype=torch.bfloat16)
    kept = [
        value
        for value in vars(PackRotation(tables, positions.int())).values()
        if isinstance(value, Tensor)
    ]
    return sum(value.nbytes for value in kept) / len(positions)


def dry_run(shape: ModelShape, *, processes: int, tensor: int, pipeline: int) -> DryRun:
    """Run the second stage of a layout on a fake device."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "model": {"path": str(write_config_json(shape, Path(folder) / "model"))},
                "data": {"train": "none.parquet", "max_prompt_tokens": 1024},
                "parallel": {"tensor": tensor, "pipeline": pipeline},
                "rollout": {"max_response_tokens": 3072},
                "trainer": {"tokens_per_micro_batch": 8192, "recompute": "full"},
            }
        )
        return dry_run_rank(
            config, processes=processes, rank=processes // pipeline, micro_batches=4
        )


def _sent(run: DryRun) -> int:
    sends = (one for one in run.phases["update"].collectives if "send" in one.operation)
    return sum(one.count for one in sends)


def rows() -> Iterator[Row]:
    """Yield operations, bytes, messages and waits."""
    for sequences, before in BEFORE.items():
        now = _scan_operations(sequences)
        yield Row("a scan", f"{sequences} sequences", 1, before, now, "operations", "counted")
    shape = qwen25_72b(8)
    now = _rotation_bytes(shape)
    yield Row("rotation in a prepared pack", "any", 1, 256, now, "bytes a token", "counted")
    run = dry_run(shape, processes=1024, tensor=8, pipeline=4)
    stalls = sum(run.phases[phase].stalls.total() for phase in ("update", "step"))
    layout = "72B tp8 pp4 dp32"
    yield Row("messages of a stage", layout, 1024, 16, _sent(run), "an update", "counted")
    yield Row("reads by the host", layout, 1024, 11, stalls, "an update", "counted")
    largest = 2 * shape.hidden_size * shape.vocab_size / 8
    mib = 2**20
    now = 2 * min(PIECE, largest) / mib
    yield Row("swap of the reference policy", layout, 1024, largest / mib, now, "MiB", "counted")
