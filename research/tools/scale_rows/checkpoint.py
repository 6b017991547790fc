"""Descriptions of shards that the save of a checkpoint exchanges."""

import gc
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from megatron_rl.telemetry.metrics import PeakMemory
from research.tools.scale_rows import Row
from tests.ranks import fork_from, run_ranks

TITLE = "Checkpoints: descriptions of shards"
TEXT = """
Descriptions of shards that the busiest rank receives in one save or load, the CPU seconds of the
slowest rank, and the most by which a rank's peak of resident memory grows, for a Qwen2 of 48 layers
of width 8 under tp2 pp2 (its tensors are tiny: what is left is the cost of their number). The first
save exchanges all ranks' descriptions; later ones only what rank 0 writes to the table of contents;
a load, what each rank reads. `before`, commit 4c2004c, was measured by the same program on the same
machine, beside one other process (alone, its seconds were within 15%, but for one first save):
every save exchanged descriptions once more than the first one now.

Extrapolated with the line through 8 and 32 ranks, not measured, 1,024 ranks would receive 459,000
descriptions in a save before, 258,000 now in the first and 3,500 in a later one; in a load 255,000
before and 54,000 now. CPU seconds: 28 in a save before, 13 and 6 now; in a load 21 and 12. All
these ranks share two cores, so their seconds grow also because caches and cores are shared; the
number of descriptions does not. Memory does not grow with the number of ranks.
"""
LAYERS, SAVES, LOADS = 48, 4, 2
RANKS = (8, 16, 32)
BEFORE = {  # descriptions, CPU seconds, MiB
    ("first save", 8): (14121, 0.510, 16.3), ("first save", 16): (17627, 0.659, 15.7),
    ("first save", 32): (24639, 1.14, 16.4), ("later save", 8): (14121, 0.511, 0.988),
    ("later save", 16): (17627, 0.753, 1.01), ("later save", 32): (24639, 1.17, 2.01),
    ("load", 8): (7931, 0.940, 1.44), ("load", 16): (9877, 1.02, 2.52),
    ("load", 32): (13769, 1.42, 3.27),
}  # fmt: skip


def make_model(folder: Path) -> None:
    """Write a random Qwen2 of many tiny layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _items(one: Any) -> int:
    """Count the descriptions in an object of one rank: a list, or a plan of writing."""
    return (
        len(one)
        if isinstance(one, list)
        else len(items)
        if isinstance(items := getattr(one, "items", None), list)
        else 0
    )


class _Cost(NamedTuple):
    """Of one save or load on one rank."""

    received: int  # descriptions
    seconds: float  # of the CPU
    memory: float  # MiB by which the peak grew


def measure(rank: int, world_size: int, root: str) -> list[_Cost]:
    """Return the costs of each save, then of each load, on this rank."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    topology = groups.initialise(tensor=2, pipeline=2)
    actor = MegatronActor(Path(root) / "model", topology=topology, settings=ActorSettings())
    gather_all, gather, received = dist.all_gather_object, dist.gather_object, 0

    def count_all(object_list: list, *args: Any, **options: Any) -> None:
        nonlocal received
        gather_all(object_list, *args, **options)
        received += sum(map(_items, object_list))

    def count(*args: Any, **options: Any) -> None:
        nonlocal received
        gather(*args, **options)
        objects = options.get("object_gather_list") or (args[1] if len(args) > 1 else None)
        received += sum(map(_items, objects or []))

    results, memory = [], PeakMemory()
    folders = [Path(root) / f"{world_size}-{number}" for number in range(SAVES)]
    with mock.patch.multiple(dist, all_gather_object=count_all, gather_object=count):
        for work in [*(partial(actor.save, each) for each in folders),
                     *(partial(actor.load, each) for each in folders[:LOADS])]:  # fmt: skip
            gc.collect()
            memory.reset()
            received, held, start = 0, memory.now(), time.process_time()
            work()
            seconds = time.process_time() - start
            results.append(_Cost(received, seconds, (memory.peak() - held) / 2**20))
    return results


def rows() -> Iterator[Row]:
    """Yield the first and the last save at each number of ranks."""
    fork_from("megatron_rl.actor.actor")
    with tempfile.TemporaryDirectory() as root:
        make_model(Path(root) / "model")
        for ranks in RANKS:
            saves = run_ranks(measure, ranks, root, timeout=1200)
            how = f"measured at {ranks} gloo ranks"
            for kind, index in (("first save", 0), ("later save", SAVES - 1), ("load", -1)):
                costs = [rank[index] for rank in saves]
                for number, (what, unit) in enumerate(
                    (("descriptions received", "a rank"), ("CPU seconds", "s"), ("memory", "MiB"))
                ):
                    then = BEFORE[kind, ranks][number]
                    most = max(cost[number] for cost in costs)
                    yield Row(f"{what}, {kind}", "tp2 pp2", ranks, then, most, unit, how)
