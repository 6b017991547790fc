"""Balance of a large model's export over writers and senders."""

from collections import Counter
from collections.abc import Iterator

import torch

from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import tensor_shapes
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen3_235b, qwen25_72b

TITLE = "Export of the model"
TEXT = """
What the slowest rank of the final export writes, and how often ranks exchange something, in
bfloat16. Before (commit 4c2004c) rank 0 wrote everything, and received one rectangle after another
while ranks whose part was done waited without counting progress. Now up to 16 ranks write files of
4 GiB at a time and receive buckets of 128 MiB. Counted from the plan that the export follows; a
step is one bucket for each writer.
"""
LAYOUTS = (
    ("235B", qwen3_235b, {"tp_size": 4, "pp_size": 2, "dp_size": 8, "ep_size": 8}),
    ("235B", qwen3_235b, {"pp_size": 2, "cp_size": 4, "dp_size": 128, "ep_size": 8}),
    ("72B", qwen25_72b, {"tp_size": 8, "pp_size": 4, "dp_size": 32}),
)


def rows() -> Iterator[Row]:
    """Yield bytes of the busiest writer and the number of exchanges, one after another."""
    from megatron_rl.actor.export import ExportPlan, find_owners  # Megatron takes long to import

    for model, build, sizes in LAYOUTS:
        ranks = 1
        for name in ("tp_size", "pp_size", "cp_size", "dp_size"):
            ranks *= sizes.get(name, 1)
        shape, topology = build(), Topology(world_size=ranks, **sizes)
        dtypes = dict.fromkeys(tensor_shapes(shape), torch.bfloat16)
        plan = ExportPlan(shape, topology, dtypes=dtypes, fused=True)
        owners = find_owners(shape, topology, fused=True)
        tiles = sum(rank != 0 for pieces in owners.values() for rank, _ in pieces)
        written: Counter[int] = Counter()
        for file in plan.files:
            for bucket in file.buckets:
                written[file.writer] += sum(map(plan.bytes_of, bucket.pieces))
        layout = f"{model} " + " ".join(f"{key[:2]}{size}" for key, size in sizes.items())
        whole, most = written.total() / 1e9, max(written.values()) / 1e9
        yield Row("written by the busiest rank", layout, ranks, whole, most, "GB", "counted")
        yield Row("exchanges one after another", layout, ranks, tiles, plan.steps, "", "counted")
