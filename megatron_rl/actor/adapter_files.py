"""Adapters as a folder that the `peft` library reads: adapter_config.json and safetensors.

q, k and v share one A here, and so do gate and up; in the files each has its own copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.export import find_owners
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.agreement import run_on_rank_0, wire_device
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import ABOUT, FACTORS, factor_name, peft_problem, write_base
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.adapted import AdaptedWeight, LocalWeight
from megatron_rl.resharding.pieces import Piece, Span

Factor = Literal["lora_A", "lora_B"]


@torch.no_grad()
def export_adapters(actor: MegatronActor, folder: str | Path) -> None:
    """Write an actor's adapters as a `peft` folder; it appears when complete. Collective.

    Rank 0 receives every rectangle of a factor from the first rank that has it, and writes them.
    Raises ValueError for adapters that `peft` has no format for.
    """
    lora, topology, folder = actor.settings.lora, actor.topology, Path(folder)
    assert lora is not None, "the actor has no adapters"
    if (problem := peft_problem(actor.shape, lora.targets)) is not None:
        raise UserError(problem)
    weights = actor.named_parameters_local()
    tensors: dict[str, Tensor] = {}
    for name, factor, owner, piece in _rectangles(actor.shape, topology, lora):
        if topology.rank not in (0, owner):
            continue
        span = piece.rows if factor == "lora_B" else piece.columns
        if topology.rank == owner:
            values = _read(weights[piece.parameter], factor, piece).to(wire_device())
        else:
            size = (span[1] - span[0], lora.rank)
            values = torch.empty(size, dtype=actor.settings.dtype, device=wire_device())
        if owner != 0 and topology.rank == owner:
            dist.send(values, dst=0)
        elif owner != 0:
            dist.recv(values, src=owner)
        if topology.rank == 0:
            _place(tensors, factor_name(name, factor), values.cpu(), span)
    source = actor.model_folder
    run_on_rank_0(
        lambda: _write(tensors, lora, source=source, folder=folder), doing=f"writing {folder}"
    )


def _rectangles(
    shape: ModelShape, topology: Topology, lora: LoraSection
) -> Iterator[tuple[str, Factor, int, Piece]]:
    """Yield module, factor, owner and piece of every distinct part, alike on every rank."""
    owners = find_owners(shape, topology, fused=False)
    for tensor in tensor_shapes(shape):
        tiles = owners[tensor]
        parameter = tiles[0][1].parameter.removesuffix(".weight")
        if parameter.rpartition(".linear_")[2] not in lora.targets:
            continue
        if tiles[0][1].parameter.endswith(".bias"):
            continue
        seen: set[tuple[Factor, Span]] = set()
        for owner, piece in tiles:
            parts: tuple[tuple[Factor, Span], ...] = (
                ("lora_A", piece.columns),
                ("lora_B", piece.rows),
            )
            for factor, span in parts:
                if (factor, span) not in seen:
                    seen.add((factor, span))
                    yield tensor.removesuffix(".weight"), factor, owner, piece


def _read(weight: LocalWeight, factor: Factor, piece: Piece) -> Tensor:
    """Return this rank's part of a factor with r columns: rows of B, or columns of A as rows."""
    assert isinstance(weight, AdaptedWeight), f"{piece.parameter} has no adapter"
    height, width = piece.shape
    if factor == "lora_B":
        return weight.b.detach()[piece.top : piece.top + height].contiguous()
    return weight.a.detach().t()[piece.left : piece.left + width].contiguous()


def _place(tensors: dict[str, Tensor], name: str, values: Tensor, span: Span) -> None:
    """Copy a part to its place; the factor grows, because parts of one factor come in any order."""
    old = tensors.get(name, values.new_zeros(0, values.shape[1]))
    if len(old) < span[1]:
        old = torch.cat([old, values.new_zeros(span[1] - len(old), values.shape[1])])
    old[slice(*span)] = values
    tensors[name] = old


def _write(
    tensors: dict[str, Tensor], lora: LoraSection, *, source: str | Path, folder: Path
) -> None:
    files = {
        name: (values.t() if ".lora_A." in name else values).contiguous()
        for name, values in tensors.items()
    }
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_file(files, partial / FACTORS, metadata={"format": "pt"})
    write_base(partial, model=source)
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (partial / ABOUT).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
