"""Descriptions of shards that the save of a checkpoint exchanges."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.ranks import fork_from, run_ranks
from tools.benchmarks.scale_rows import Row

TITLE = "Checkpoints: descriptions of shards"
TEXT = """
Descriptions of shards that the busiest rank receives in one save, and the CPU seconds of that rank
in the save, for a Qwen2 of 48 layers of width 8 under tp2 pp2 (its tensors are tiny: what is left
is the cost of their number). The first save exchanges all ranks' descriptions; later ones only
what rank 0 writes to the table of contents. Before (commit 4c2004c) every save exchanged them, once
more than the first one now, and grew by 438 descriptions with each rank. The first save grows by
244, a later one by 0.75: extrapolated, not measured, 459,000 before, 258,000 and 3,500 now at 1,024
ranks.
"""
LAYERS, SAVES = 48, 4
RANKS = (8, 16, 32)
BEFORE = {8: (14121, 0.561), 16: (17627, 0.684), 32: (24639, 1.11)}


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
    return len(one) if isinstance(one, list) else len(getattr(one, "items", []) or [])


def measure(rank: int, world_size: int, root: str) -> list[tuple[int, float]]:
    """Return (descriptions received, CPU seconds) of each save on this rank."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    topology = groups.initialise(tensor=2, pipeline=2)
    actor = MegatronActor(Path(root) / "model", topology=topology, settings=ActorSettings())
    gather_all, gather, received = dist.all_gather_object, dist.gather_object, 0

    def count_all(objects: list, *args: Any, **options: Any) -> None:
        nonlocal received
        gather_all(objects, *args, **options)
        received += sum(map(_items, objects))

    def count(*args: Any, **options: Any) -> None:
        nonlocal received
        gather(*args, **options)
        objects = options.get("object_gather_list") or (args[1] if len(args) > 1 else None)
        received += sum(map(_items, objects or []))

    results = []
    with mock.patch.multiple(dist, all_gather_object=count_all, gather_object=count):
        for number in range(SAVES):
            received, start = 0, time.process_time()
            actor.save(Path(root) / f"{world_size}-{number}")
            results.append((received, time.process_time() - start))
    return results


def rows() -> Iterator[Row]:
    """Yield the first and the last save at each number of ranks."""
    fork_from("megatron_rl.actor.actor")
    with tempfile.TemporaryDirectory() as root:
        make_model(Path(root) / "model")
        for ranks in RANKS:
            saves = run_ranks(measure, ranks, root, timeout=1200)
            how = f"measured at {ranks} gloo ranks"
            before = BEFORE[ranks]
            for kind, index in (("first", 0), ("later", SAVES - 1)):
                most, seconds = max(rank[index] for rank in saves)
                what = f"descriptions received, {kind} save"
                yield Row(what, "tp2 pp2", ranks, before[0], most, "a rank", how)
                what = f"CPU seconds, {kind} save"
                yield Row(what, "tp2 pp2", ranks, before[1], seconds, "s", how)
