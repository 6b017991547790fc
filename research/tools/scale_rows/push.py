"""Balance of a weight push's rounds over the ranks' ports."""

import itertools
from collections.abc import Iterator

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen3_30b, qwen3_235b, qwen25_72b
from tools.benchmarks.push_simulation import simulate

TITLE = "The weight push: who sends at once"
TEXT = """
Time of the rounds over the time of the busiest port, where all ranks end a round together at its
busiest port (`tools/benchmarks/push_simulation.py`); 1 is the best that any order of the same
messages can reach. Models with 4 (235B, 30B) or 8 layers (72B), nodes of 8 ranks, in bfloat16.
Slices are written directly into vLLM's parameters, with buckets of 512 MiB, or assembled to whole
tensors for vLLM's loaders, with buckets of 64 and 512 MiB. `before` by the same simulation: commit
4c2004c with slices written directly and buckets of 64 MiB (experts then always used loaders), and
commit 87852f9 for loaders. Mixtures of experts through loaders with buckets of 64 MiB took 2 to 20
times the ideal until 2026-11-24. The three layouts before the last two rows have all layers: their
experts are sent to one share of the nodes after the other. With 64 expert ranks and tp4, that has a
third of the messages; to all at once the ratio is 1.15.

The last rows are the largest ratio of all 23 possible layouts of Qwen3-235B-A22B
at tp8, 256 to 1,024 ranks, 4 or 8 stages and 8 to 64 expert ranks, with all layers; their `before`
is commit 62d85b8.
There one of them, 512 ranks at tp8 pp8 ep64 with expert-parallel engines, had 7.85: the expert
ranks that send to one engine rank are next to each other, so a round was full when few of them had
sent. They now alternate with those of other engine ranks. The planner of layouts assumes 2.0 times
the mean rank's bytes for every push.
"""
WIRE = 1 << 25  # elements: 64 MiB in bfloat16
NODE = 8
SIZES = itertools.product((256, 512, 1024), (4, 8), (8, 16, 32, 64))  # ranks, stages, experts
POSSIBLE = [sizes for sizes in SIZES if sizes[0] // sizes[1] % sizes[2] == 0]  # a stage has enough


def _layouts() -> list[tuple[str, ModelShape, ActorLayout, EngineLayout, tuple[float | str, ...]]]:
    """List name of the model, its shape, actor, engines and `before` of each way."""
    whole, large, small, dense = qwen3_235b(), qwen3_235b(4), qwen3_30b(4), qwen25_72b(8)
    unknown = ("not run",)  # directly only
    return [
        ("30B", small, ActorLayout(2, data=4, expert=4), EngineLayout(4, 8), (2.80, 1.16, 1.03)),
        ("235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64), (13.9, 8.52, 3.02)),
        ("235B", large, ActorLayout(4, 2, 1, 8, expert=8), EngineLayout(8, 64), (11.2, 7.42, 2.47)),
        ("235B", large, ActorLayout(4, 2, 1, 8, expert=8), EngineLayout(8, 64, True),
         (12.3, 2.28, 2.24)),
        ("235B", large, ActorLayout(1, 1, 4, 16, expert=32), EngineLayout(8, 64, True),
         (15.6, 25.3, 1.00)),
        ("235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64, True),
         (1.95, 3.83, 3.31)),
        ("72B", dense, ActorLayout(8, 4, 1, 4), EngineLayout(8, 128), (2.89, 3.17, 3.10)),
        ("72B", dense, ActorLayout(4, 4, 1, 8), EngineLayout(8, 128), (3.22, 4.73, 4.47)),
        ("235B", large, ActorLayout(4, 4, 1, 16, expert=16), EngineLayout(8, 256),
         (31.4, 25.4, 5.29)),
        ("235B", large, ActorLayout(1, 2, 4, 128, expert=8), EngineLayout(8, 1024),
         (13.9, 8.52, 3.02)),
        ("235B", whole, ActorLayout(4, 2, 1, 128, expert=64), EngineLayout(8, 1024), unknown),
        ("235B", whole, ActorLayout(8, 4, 1, 8, expert=16, expert_tensor=1), EngineLayout(8, 256),
         unknown),
        ("235B", whole, ActorLayout(8, 8, 1, 16, expert=64, expert_tensor=1), EngineLayout(8, 1024),
         unknown),
    ]  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield time / ideal of every layout, written directly and through loaders."""
    ways = {
        "direct, 512 MiB": (8 * WIRE, None),
        "loaders, 64 MiB": (WIRE // 4, WIRE // 2),
        "loaders, 512 MiB": (2 * WIRE, 4 * WIRE),
    }
    for model, shape, actor, engine, before in _layouts():
        layout = f"{model} {str(actor)[6:]} -> {str(engine)[5:].partition(' x ')[0]}"
        for (way, (wire, tensors)), was in zip(ways.items(), before, strict=False):
            found = simulate(
                shape, actor, engine, wire_elements=wire, tensor_elements=tensors,
                ranks_per_node=NODE,
            )  # fmt: skip
            what, now = f"time / ideal, {way}", found.over_ideal
            yield Row(what, layout, actor.world_size, was, now, "", "simulated")
    for name, expert_parallel in (("tp8", False), ("tp8 expert parallel", True)):
        ratio, ranks, place = max(_ratios(expert_parallel))
        was = 7.85 if expert_parallel else 1.95
        what = "time / ideal, direct, 512 MiB, largest"
        yield Row(what, f"235B {place} -> {name}", ranks, was, ratio, "", "simulated")


def _ratios(expert_parallel: bool) -> Iterator[tuple[float, int, str]]:
    """Yield time / ideal, ranks and layout of every possible layout of 235B."""
    for ranks, pipeline, expert in POSSIBLE:
        data = ranks // (8 * pipeline)
        actor = ActorLayout(8, pipeline, 1, data, expert=expert, expert_tensor=1)
        engine = EngineLayout(8, ranks, expert_parallel)
        found = simulate(qwen3_235b(), actor, engine, wire_elements=8 * WIRE, ranks_per_node=NODE)
        yield found.over_ideal, ranks, str(actor)[6:]
