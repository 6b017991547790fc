"""The table that `megatron-rl convert --dry-run` prints: each kind of tensor, there and here."""

import torch

from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import padded_vocabulary

HEADINGS = ("Hugging Face tensor", "shape", "dtype", "Megatron parameter", "cut over processes")


def build_name_table(
    shape: ModelShape, layout: ActorLayout, dtypes: dict[str, torch.dtype]
) -> list[tuple[str, ...]]:
    """One line per Hugging Face tensor of each kind, layers and experts as ranges; see HEADINGS."""
    lines: list[tuple[str, ...]] = []
    for weight in shape.weights:
        cut = _cut(weight, shape, layout)
        for name, size in zip(weight.hf, weight_shapes(weight, shape=shape), strict=True):
            found = {str(dtypes[one])[6:] for one in _every(name, weight, shape)}
            lines.append(
                (
                    _ranged(name, shape),
                    " x ".join(map(str, size)),
                    "/".join(sorted(found)),
                    weight.megatron.replace("{layer}", "i").replace("{expert}", "e"),
                    cut,
                )
            )
    return lines


def format_table(lines: list[tuple[str, ...]]) -> str:
    """Columns aligned, one line per row."""
    rows = [HEADINGS, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    texts = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(text.rstrip() for text in texts)


def describe_shares(shape: ModelShape, layout: ActorLayout) -> list[str]:
    """What one process of each pipeline stage holds."""
    lines = []
    per_stage = layout.world_size // layout.pipeline
    for stage in range(layout.pipeline):
        first = stage * per_stage
        elements = sum(piece.size for piece in layout.pieces(shape, rank=first))
        processes = (
            f"process {first}"
            if per_stage == 1
            else f"processes {first} to {first + per_stage - 1}"
        )
        lines.append(f"{processes} (stage {stage}): {elements:,} elements each")
    return lines


def _every(name: str, weight: Weight, shape: ModelShape) -> list[str]:
    layers = range(shape.num_layers if "{layer}" in name else 1)
    experts = range(shape.experts.num_experts if weight.part == "expert" and shape.experts else 1)
    return [name.format(layer=layer, expert=expert) for layer in layers for expert in experts]


def _ranged(name: str, shape: ModelShape) -> str:
    last = shape.experts.num_experts - 1 if shape.experts else 0
    return name.format(layer=f"[0-{shape.num_layers - 1}]", expert=f"[0-{last}]")


def _cut(weight: Weight, shape: ModelShape, layout: ActorLayout) -> str:
    parts = f" / {layout.tensor}" if layout.tensor > 1 else ""
    rows, columns = f"rows{parts}", f"columns{parts}"
    padded = padded_vocabulary(shape.vocab_size, tp_size=layout.tensor)
    text = {
        "replicated": "whole, on each",
        "vocabulary": f"{rows}, padded to {padded}",
        "columns": columns,
        "qkv": f"{rows}, q k v of each group together",
        "gate_up": f"{rows}, gate above up",
    }[weight.cut]
    return (
        f"{text}; experts / {layout.expert}"
        if weight.part == "expert" and layout.expert > 1
        else text
    )
