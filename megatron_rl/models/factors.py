"""The factors of low-rank adapters (LoRA) as weights of a model of their own.

A model whose weights are the factors alone has the layouts, pieces and plans of any other model, so
that adapters are pushed, checked and counted by the same code. q, k and v share one A, and so do
gate and up: it has the name of the first of them.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from megatron_rl.models.weights import Weight


class Factors(NamedTuple):
    """Rank of adapters and the linears that have one, by the endings of Megatron's names."""

    rank: int
    targets: tuple[str, ...]


def is_adapted(weight: Weight, targets: Collection[str]) -> bool:
    """Return whether a weight or bias belongs to a linear with an adapter."""
    stem = weight.megatron.rpartition(".")[0]
    return stem.rpartition(".linear_")[2] in targets


def factor_weights(weights: Sequence[Weight], targets: Collection[str]) -> Iterator[Weight]:
    """Yield A and B of every kind of linear with an adapter.

    Under tensor parallelism one of them is cut like the weight, and the other one is whole.
    """
    for weight in weights:
        if not is_adapted(weight, targets) or not weight.megatron.endswith(".weight"):
            continue
        hf = [name.removesuffix(".weight") for name in weight.hf]
        megatron, vllm = (name.removesuffix(".weight") for name in (weight.megatron, weight.vllm))
        rows, columns = weight.size
        by_columns = weight.cut == "columns"
        yield Weight(
            weight.part, "columns" if by_columns else "replicated", ("adapter_rank", columns),
            (f"{hf[0]}.lora_A.weight",), f"{megatron}.lora_a", f"{vllm}.lora_a",
            layers=weight.layers,
        )  # fmt: skip
        yield Weight(
            weight.part, "replicated" if by_columns else weight.cut, (rows, "adapter_rank"),
            tuple(f"{name}.lora_B.weight" for name in hf), f"{megatron}.lora_b", f"{vllm}.lora_b",
            layers=weight.layers,
        )  # fmt: skip
