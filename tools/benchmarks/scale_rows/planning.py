"""Time and memory of planning a weight push on each rank, and the plan's size."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push_schedule import plan_for_rank
from tools.benchmarks.scale_rows import Row
from tools.benchmarks.scale_rows._models import qwen3_30b, qwen3_235b, qwen25_72b

TITLE = "The weight push: planning"
TEXT = """
Each rank plans the push once, at its start. Processor seconds of rank 0 for the whole model,
nodes of 8 ranks, buckets of 64 MiB, slices written directly; and what rank 0 does in a push:
rounds, and slices that it sends or receives. `before` is commit 4c2004c, on the same machine;
both were measured during other work, where a processor second is up to twice an idle one. Where
it was not run, plans for 1,024 ranks were expected to take minutes.
"""


class _Case(NamedTuple):
    model: str
    shape: ModelShape
    actor: ActorLayout
    engine: EngineLayout
    before: tuple[float | str, float | str, float | str]  # seconds, rounds, slices


def _cases() -> list[_Case]:
    large, small, dense = qwen3_235b(), qwen3_30b(), qwen25_72b()
    unknown = ("not run",) * 3
    return [
        _Case(
            "30B", small, ActorLayout(2, data=4, expert=4), EngineLayout(4, 8), (4.9, 596, 23194)
        ),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64),
            (31.7, 6803, 52609),
        ),
        _Case(
            "235B", large, ActorLayout(1, 2, 4, 8, expert=8), EngineLayout(8, 64, True),
            (5.1, 937, 5233),
        ),
        _Case("72B", dense, ActorLayout(8, 4, 1, 32), EngineLayout(8, 1024), (28.0, 303, 3462)),
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
    ]  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield seconds, rounds and slices of every layout."""
    for case in _cases():
        start = time.process_time()
        plan = plan_for_rank(
            case.shape, case.actor, case.engine, rank=0, wire_elements=1 << 25, ranks_per_node=8
        )
        seconds = time.process_time() - start
        messages = [each for part in plan.rounds for each in (*part.sends, *part.receives)]
        slices = sum(len(message.slices) for message in messages)
        layout = f"{case.model} {str(case.actor)[6:]} -> {str(case.engine)[5:].partition(' x ')[0]}"
        ranks = case.actor.world_size
        numbers = (
            ("seconds of planning", seconds, "CPU s a rank", "measured"),
            ("rounds", len(plan.rounds), "a push", "counted"),
            ("slices sent or received", slices, "a rank", "counted"),
        )
        for (what, now, unit, how), before in zip(numbers, case.before, strict=True):
            yield Row(what, layout, ranks, before, now, unit, how)
