"""Sizes of low-rank adapters (LoRA) on a model's linears."""

from collections.abc import Collection, Iterator

from megatron_rl.models.factors import is_adapted
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight

# vLLM's MaxLoRARanks, without 1: ranks of the slots in which its kernels read adapters.
SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def adapted_linears(
    shape: ModelShape, targets: Collection[str]
) -> Iterator[tuple[Weight, int, int]]:
    """Yield each kind of weight with an adapter and its sides: the one that is cut, and the other.

    targets: endings of Megatron's names, such as `qkv` of `linear_qkv`. A factor of rank r has r
    elements per unit of one side.
    """
    for weight in shape.weights:
        if weight.megatron.endswith(".weight") and is_adapted(weight, targets):
            sizes = weight_shapes(weight, shape=shape)
            outputs, inputs = sum(size[0] for size in sizes), sizes[0][1]
            yield weight, *((inputs, outputs) if weight.cut == "columns" else (outputs, inputs))


def target_problems(shape: ModelShape, targets: Collection[str]) -> list[str]:
    """List why linears cannot have adapters."""
    if shape.delta is not None:
        return [
            f"lora: adapters of {shape.architecture} are not supported, because targets would be "
            "linears of its attention layers alone, one of four; unset lora"
        ]
    if shape.latent is None or "qkv" not in targets:
        return []
    others = [target for target in targets if target != "qkv"]
    return [
        f"lora.targets={list(targets)}: the model's latent attention has no linear for queries, "
        f"keys and values together; set it to {others or ['proj']}"
    ]


def are_in_experts_only(shape: ModelShape, targets: Collection[str]) -> bool:
    """Return True if no other linear than those of experts has an adapter."""
    return all(weight.part == "expert" for weight, *_ in adapted_linears(shape, targets))


def count_adapter_parameters(shape: ModelShape, *, rank: int, targets: Collection[str]) -> int:
    """Count the parameters of all adapters of a model."""
    total = 0
    for weight, cut, whole in adapted_linears(shape, targets):
        copies = len(shape.layers_with(weight.layers))
        if weight.part == "expert":
            assert shape.experts is not None, "experts without a shape"
            copies *= shape.experts.num_experts
        total += copies * rank * (cut + whole)
    return total


def adapters_of_experts(shape: ModelShape, targets: Collection[str]) -> str | None:
    """Name adapters that one product of all experts cannot have; None if there are none."""
    if shape.experts is None or not {"fc1", "fc2"} & set(targets):
        return None
    return "adapters of experts (fc1 or fc2 in lora.targets)"


def slot_rank(rank: int) -> int:
    """Return the rank of vLLM's slots for adapters of this rank, which are padded with zeros."""
    return next(each for each in SLOT_RANKS if each >= rank)


def slot_elements(
    shape: ModelShape, *, rank: int, targets: Collection[str], tensor: int = 1
) -> int:
    """Count the elements of one slot on one of `tensor` vLLM ranks.

    q, k and v each have an A, and so do gate and up. With fewer key-value heads than ranks their
    copies are not counted.
    """
    total = 0
    for weight, cut, whole in adapted_linears(shape, targets):
        factors = whole * (1 if weight.cut == "columns" else len(weight.hf)) + cut // tensor
        total += len(shape.layers_with(weight.layers)) * factors
    return slot_rank(rank) * total


def engine_modules(shape: ModelShape, targets: Collection[str]) -> list[str]:
    """Return the last names of vLLM's modules that have adapters."""
    weights = [weight for weight, *_ in adapted_linears(shape, targets)]
    return sorted({weight.vllm.removesuffix(".weight").rpartition(".")[2] for weight in weights})


def engine_problems(shape: ModelShape, *, rank: int) -> list[str]:
    """List why vLLM cannot compute with adapters itself (`lora.push: adapters`)."""
    problems = []
    if rank > SLOT_RANKS[-1]:
        problems.append(
            f"lora.rank={rank} is above {SLOT_RANKS[-1]}, vLLM's largest with lora.push=adapters; "
            "lower it, or set lora.push to merged"
        )
    if shape.experts is not None:
        problems.append(
            "lora.push=adapters: the model has experts, which vLLM with adapters computes by "
            "kernels that a CPU lacks and that nothing here has run; set lora.push to merged"
        )
    return problems
