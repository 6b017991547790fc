"""Bytes that all ranks together read from a Hugging Face folder at the start."""

from collections import defaultdict
from collections.abc import Iterator

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen3_235b, qwen25_72b

TITLE = "Reading a Hugging Face folder"
TEXT = """
Bytes that all ranks together read from the files, in bfloat16: before (commit 4c2004c) every rank
its own shard, and again for a reference policy from the same folder; now every shard once by the
ranks that share it (dense weights: data x context parallel; experts: expert data parallel), and
nothing for such a reference. Counted from the layouts' pieces; `tests/unit/actor/test_weights.py`
counts the same sums in real reads of 4 gloo ranks.
"""
LAYOUTS = (
    ("235B", qwen3_235b, ActorLayout(4, 2, 1, 8, expert=8)),
    ("235B", qwen3_235b, ActorLayout(1, 2, 4, 128, expert=8)),
    ("72B", qwen25_72b, ActorLayout(8, 4, 1, 32)),
)


def count_bytes(shape: ModelShape, layout: ActorLayout) -> tuple[int, int]:
    """Return the bytes read by all ranks, each for itself and shared."""
    each, shared, members = 0, {}, defaultdict(list)
    for rank in range(layout.world_size):
        members[layout.shard_coordinates(rank)].append(rank)
    for (stage, tensor, *expert), ranks in members.items():
        for piece in layout.pieces(shape, rank=ranks[0]):
            shard = expert if ".experts." in piece.tensor else [tensor]
            shared[stage, *shard, piece] = 2 * piece.size
            each += len(ranks) * 2 * piece.size
    return each, sum(shared.values())


def rows() -> Iterator[Row]:
    """Yield the bytes with and without a reference policy from the same folder."""
    for model, build, layout in LAYOUTS:
        each, shared = (size / 1e12 for size in count_bytes(build(), layout))
        name = f"{model} {str(layout)[6:]}"
        yield Row("bytes read", name, layout.world_size, each, shared, "TB", "counted")
        what = "bytes read, with a reference policy"
        yield Row(what, name, layout.world_size, 2 * each, shared, "TB", "counted")
