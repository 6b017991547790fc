"""Time and memory of planning a weight push on each rank, and the plan's size."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import plan_for_rank
from research.tools.scale_rows import Row
from tools.benchmarks.large_models import qwen3_30b, qwen3_235b, qwen25_72b

TITLE = "The weight push: planning, and the host's work"
TEXT = """
Each rank plans the push once, at its start. Processor seconds of rank 0 for the whole model, nodes
of 8 ranks, slices written directly; and what rank 0 does in a push: rounds, messages to and from
each peer, and copies. `before` are commit 4c2004c for seconds and rounds and commit 87852f9 for
messages and copies, when buckets had 64 MiB and each slice was copied by a call of its own; now
they have 512 MiB, a message is packed by one call for contiguous slices and one for others, and
written in runs of slices. With many expert ranks, experts are sent to at most four shares of the
nodes, one after the other: at tp4 and ep64 there were 27,588 messages until 2026-11-24. Commit
a82cf41 could not plan the last two layouts: they have more tensor ranks than key-value heads, and
so several owners of the queries, which it took for experts. Where it was not run, plans for 1,024
ranks were expected to take minutes. Seconds now are of an idle machine on 2026-11-25; those used
before, `before` included, were about 2.5 times slower, and on a busy one the last three took up to
10.6 s. Of all 23 possible layouts of 235B at tp8, with both
kinds of engines, none took longer than the last one here.
"""


class _Case(NamedTuple):
    model: str
    shape: ModelShape
    actor: ActorLayout
    engine: EngineLayout
    before: tuple[float | str, ...]  # seconds, rounds, messages, copies


def _cases() -> list[_Case]:
    large, small, dense = qwen3_235b(), qwen3_30b(), qwen25_72b()
    unknown = ("not run",) * 4
    return [
        _Case(
            "30B", small, ActorLayout(2, data=4, expert=4), EngineLayout(4, 8),
            (4.9, 596, 2020, 28236),
        ),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64),
            (31.7, 6803, 39533, 56800),
        ),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64, True),
            (5.1, 937, 2720, 9424),
        ),
        _Case(
            "72B", dense, ActorLayout(8, 4, 1, 32), EngineLayout(8, 1024), (28.0, 303, 1880, 2336)
        ),
        _Case("30B", small, ActorLayout(2, data=512, expert=4), EngineLayout(4, 1024), unknown),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 128, expert=8), EngineLayout(8, 1024), unknown
        ),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 128, expert=8), EngineLayout(8, 1024, True), unknown
        ),
        _Case(
            "235B", large, ActorLayout(4, 2, 1, 128, expert=64), EngineLayout(8, 1024), unknown
        ),
        _Case(
            "235B", large, ActorLayout(8, 4, 1, 32, expert=64, expert_tensor=1),
            EngineLayout(8, 1024), unknown,
        ),
        _Case(
            "235B", large, ActorLayout(8, 8, 1, 16, expert=64, expert_tensor=1),
            EngineLayout(8, 1024), unknown,
        ),
    ]  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield seconds, rounds and slices of every layout."""
    for case in _cases():
        start = time.process_time()
        plan = plan_for_rank(
            case.shape, case.actor, case.engine, rank=0, wire_elements=1 << 28, ranks_per_node=8
        )
        seconds = time.process_time() - start
        sends = [each for part in plan.rounds for each in part.sends]
        receives = [each for part in plan.rounds for each in part.receives]
        peers = sum(len(each.to) for each in (*sends, *receives)) + len(receives)
        blocks = sum(len(each.runs) for each in receives)
        copies = 2 * len(sends) + blocks + 2
        layout = f"{case.model} {str(case.actor)[6:]} -> {str(case.engine)[5:].partition(' x ')[0]}"
        ranks = case.actor.world_size
        numbers = (
            ("seconds of planning", seconds, "CPU s a rank", "measured"),
            ("rounds", len(plan.rounds), "a push", "counted"),
            ("messages", peers, "a rank", "counted"),
            ("copies", copies, "a rank", "counted"),
        )
        for (what, now, unit, how), before in zip(numbers, case.before, strict=True):
            yield Row(what, layout, ranks, before, now, unit, how)
