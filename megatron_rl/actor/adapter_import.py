"""Start of adapters from a folder of the `peft` library, under any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from megatron_rl.actor.settings import LoraSettings
from megatron_rl.actor.weights import named_parameters
from megatron_rl.distributed.agreement import run_on_rank_0, sync_errors_across_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.peft_folder import (
    FACTORS,
    check_peft_folder,
    factor_name,
    list_linears,
    modules_in,
)
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import layout_of
from megatron_rl.resharding.pieces import Piece


@torch.no_grad()
def load_adapters(
    chunks: Sequence[Module],
    settings: LoraSettings,
    *,
    shape: ModelShape,
    topology: Topology,
    model: str | Path,
) -> None:
    """Copy the factors of the folder `settings.path`, if set, into adapters. Collective.

    chunks: with adapters as drawn and B = 0; what the folder does not have stays so.
    Raises ValueError if the folder does not fit rank, alpha, targets or model.
    """
    if settings.path is None:
        return
    folder, rank, alpha = Path(settings.path), settings.rank, settings.alpha
    run_on_rank_0(
        lambda: check_peft_folder(
            folder, model=model, shape=shape, rank=rank, alpha=alpha, targets=settings.targets
        ),
        doing=f"reading {folder}",
    )
    pieces: dict[str, list[Piece]] = {}
    for piece in layout_of(topology).pieces(shape, rank=topology.rank):
        pieces.setdefault(piece.parameter, []).append(piece)
    factors = named_parameters(chunks, adapters=True)
    linears = {name: each for each in list_linears(shape, settings.targets)
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
