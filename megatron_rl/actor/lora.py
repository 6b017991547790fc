"""LoRA on Megatron's parallel linears: y = W x + (alpha / r) B A x, W frozen (arXiv 2106.09685).

Adapters start from seeds, or from a folder of the `peft` library, under any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_rl.actor.layers import AdaptedLinear, ColumnAdapter, RowAdapter
from megatron_rl.actor.weights import named_parameters
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.agreement import run_on_rank_0, sync_errors_across_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import (
    FACTORS,
    are_in_experts_only,
    check_peft_folder,
    factor_name,
    list_linears,
    modules_in,
    target_problems,
)
from megatron_rl.models.safetensors_headers import model_fingerprint
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weights import Factors
from megatron_rl.resharding.adapted import AdaptedWeight, LocalWeight
from megatron_rl.resharding.layouts import layout_of
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.push import LocalWeights
from megatron_rl.runtime.seeds import derive_seed


class AdaptedColumnLinear(ColumnAdapter, ColumnParallelLinear):
    """ColumnParallelLinear with an adapter."""


class AdaptedRowLinear(RowAdapter, RowParallelLinear):
    """RowParallelLinear with an adapter."""


def _adapted_classes() -> dict[type, type]:
    classes: dict[type, type] = {
        ColumnParallelLinear: AdaptedColumnLinear,
        RowParallelLinear: AdaptedRowLinear,
    }
    if te.HAVE_TE:
        # This import fails without Transformer Engine.
        from megatron_rl.actor.transformer_engine import ADAPTED

        classes |= ADAPTED
    return classes


def add_adapters(
    chunks: Sequence[Module],
    lora: LoraSection,
    *,
    seed: int,
    shape: ModelShape,
    topology: Topology,
) -> None:
    """Freeze loaded chunks and add an adapter to every target; B = 0, so outputs do not change.

    A is the same under every layout. Raises ValueError if adapters of experts are not supported.
    """
    if shape.experts and topology.expert_tp_size not in (None, 1, topology.tp_size):
        raise UserError(
            f"lora with parallel.expert_tensor={topology.expert_tp_size}: adapters of experts need "
            f"1 or parallel.tensor={topology.tp_size}; set parallel.expert_tensor to one of them"
        )
    if problems := target_problems(shape, lora.targets):
        raise UserError(problems[0])
    if topology.ep_size > 1 and are_in_experts_only(shape, lora.targets):
        raise UserError(
            f"lora.targets={list(lora.targets)} are in experts only: with expert parallelism "
            "Megatron then has no parameters for its other optimizer; add qkv or proj"
        )
    pieces: dict[str, list[Piece]] = {}
    for piece in layout_of(topology).pieces(shape, rank=topology.rank):
        pieces.setdefault(piece.parameter, []).append(piece)
    for index, chunk in enumerate(chunks):
        chunk.requires_grad_(False)
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        linears = [
            (name, module)
            for name, module in chunk.named_modules()
            if ".linear_" in name and name.rpartition(".linear_")[2] in lora.targets
        ]
        assert linears, f"chunk {index} has no linear of {lora.targets}"
        for name, module in linears:
            _adapt(module, lora, pieces[f"{prefix}{name}.weight"], seed=seed)
            module.lora_gated = name.endswith("fc1")


def _adapt(module: Any, lora: LoraSection, pieces: list[Piece], *, seed: int) -> None:
    """Turn a linear into an adapted one; `pieces` are those of its weight."""
    classes = _adapted_classes()
    assert type(module) in classes, f"no adapter for {type(module).__name__}"
    module.__class__ = classes[type(module)]
    module.is_expert = getattr(module, "is_expert", False)
    like = {"dtype": module.weight.dtype, "device": module.weight.device}
    width = module.weight.shape[1]
    inputs = width * module.tp_group.size() if module.lora_cut[0] == "lora_a" else width
    first = initial_a(lora, seed=seed, inputs=inputs, name=pieces[0].tensor)
    first = first[:, slice(*pieces[0].columns)].contiguous()
    module.lora_a = Parameter(first.to(**like))
    module.lora_b = Parameter(torch.zeros(len(module.weight), lora.rank, **like))
    module.lora_scale, module.lora_enabled = lora.scale, True
    name, dimension = module.lora_cut
    for factor in ("lora_a", "lora_b"):
        parameter = getattr(module, factor)
        parameter.allreduce = getattr(module.weight, "allreduce", True)
        # The gradient norm counts parameters without this mark on the first tensor-parallel rank.
        if factor == name or (module.is_expert and module.tp_group.size() == 1):
            set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
        elif not module.is_expert:
            parameter.sequence_parallel = module.sequence_parallel


def initial_a(lora: LoraSection, *, seed: int, inputs: int, name: str) -> Tensor:
    """Draw the whole A [r, inputs] of the linear whose first Hugging Face tensor has this name.

    Uniform within 1 / sqrt(inputs), as in `peft`. B starts at 0.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    values = torch.empty(lora.rank, inputs, dtype=torch.float32, device="cpu")
    bound = 1 / math.sqrt(inputs)
    return values.uniform_(-bound, bound, generator=generator)


def adapted_weights(
    chunks: Sequence[Module], lora: LoraSection, *, seed: int, updates: int
) -> dict[str, LocalWeight]:
    """Return the model's parameters by name; a parameter with an adapter is W + scale * B A.

    updates: number of optimizer updates so far; the rounding to bfloat16 depends on it.
    """
    seed = derive_seed(seed, "lora", "rounding", updates)
    weights: dict[str, LocalWeight] = {**named_parameters(chunks)}
    factors = named_parameters(chunks, adapters=True)
    for name in [name for name in factors if name.endswith("lora_a")]:
        stem = name.removesuffix("lora_a")
        weight, b = weights[f"{stem}weight"], factors[f"{stem}lora_b"]
        assert isinstance(weight, Tensor), f"{stem} has two adapters"
        weights[f"{stem}weight"] = AdaptedWeight(weight, factors[name], b, lora.scale, seed)
    return weights


def push_sources(
    chunks: Sequence[Module],
    lora: LoraSection | None,
    *,
    shape: ModelShape,
    topology: Topology,
) -> tuple[LocalWeights, LocalWeights]:
    """Return the frozen weights, and the factors as weights of a model of their own."""
    assert lora is not None, "the actor has no adapters"
    alone = replace(shape, factors=Factors(lora.rank, tuple(lora.targets)))
    factors = named_parameters(chunks, adapters=True)
    return (
        LocalWeights(shape, topology, named_parameters(chunks)),
        LocalWeights(alone, topology, factors),
    )


@contextmanager
def without_adapters(chunks: Sequence[Module]) -> Iterator[None]:
    """Compute with the base weights alone inside the block."""
    adapted = [
        each for chunk in chunks for each in chunk.modules() if isinstance(each, AdaptedLinear)
    ]
    try:
        for module in adapted:
            module.lora_enabled = False
        yield
    finally:
        for module in adapted:
            module.lora_enabled = True


def describe_adapters(
    lora: LoraSection | None, *, seed: int, folder: str | Path
) -> dict[str, Any] | None:
    """Describe adapters and the model that they belong to, for checkpoints; None without adapters.

    Collective.
    """
    if lora is None:
        return None
    fingerprint = run_on_rank_0(lambda: model_fingerprint(folder), doing=f"reading {folder}")
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": sorted(lora.targets),
        "seed": seed,
        "model": fingerprint,
    }


@torch.no_grad()
def load_adapters(
    chunks: Sequence[Module],
    lora: LoraSection,
    *,
    shape: ModelShape,
    topology: Topology,
    model: str | Path,
) -> None:
    """Copy the factors of the folder `lora.path`, if set, into adapters. Collective.

    chunks: with adapters as drawn and B = 0; what the folder does not have stays so.
    Raises ValueError if the folder does not fit rank, alpha, targets or model.
    """
    if lora.path is None:
        return
    folder, rank, alpha = Path(lora.path), lora.rank, lora.alpha
    run_on_rank_0(
        lambda: check_peft_folder(
            folder, model=model, shape=shape, rank=rank, alpha=alpha, targets=lora.targets
        ),
        doing=f"reading {folder}",
    )
    pieces: dict[str, list[Piece]] = {}
    for piece in layout_of(topology).pieces(shape, rank=topology.rank):
        pieces.setdefault(piece.parameter, []).append(piece)
    factors = named_parameters(chunks, adapters=True)
    linears = {name: each for each in list_linears(shape, lora.targets)
               for name in each.modules}  # fmt: skip
    with (
        sync_errors_across_ranks(doing=f"reading {folder}"),
        safe_open(folder / FACTORS, framework="pt") as file,
    ):
        for name in [name for name in factors if name.endswith(".lora_a")]:
            stem = name.removesuffix(".lora_a")
            own = pieces[f"{stem}.weight"]
            group = modules_in(file.keys(), linears[own[0].tensor.removesuffix(".weight")])
            _fill(factors[name], factors[f"{stem}.lora_b"], own, group=group, file=file)


def _fill(
    a: Tensor, b: Tensor, pieces: Sequence[Piece], *, group: Sequence[str], file: Any
) -> None:
    """Copy the factors of one linear: a [R, in / tp], b [out / tp, R] with R >= blocks times r.

    pieces: those of the weight on this rank. group: the modules of the linear that the file has.
    """
    blocks: list[Tensor] = []  # different A [r, in]
    place: dict[str, int] = {}
    for module in group:
        values = _read(file, factor_name(module, "lora_A"))
        same = [index for index, block in enumerate(blocks) if torch.equal(block, values)]
        place[module] = same[0] if same else len(blocks)
        if not same:
            blocks.append(values)
    rank = len(blocks[0])
    for index, block in enumerate(blocks):
        a[index * rank : (index + 1) * rank] = block[:, slice(*pieces[0].columns)]
    for piece in pieces:
        module = piece.tensor.removesuffix(".weight")
        if module not in place:
            continue
        rows = slice(piece.top, piece.top + piece.shape[0])
        columns = slice(place[module] * rank, (place[module] + 1) * rank)
        b[rows, columns] = _read(file, factor_name(module, "lora_B"))[slice(*piece.rows)]


def _read(file: Any, name: str) -> Tensor:
    values: Tensor = file.get_tensor(name)
    if not torch.isfinite(values).all():
        raise UserError(f"{name} has values that are not finite: write the folder again")
    return values
