"""Table of tensor names in both formats, printed by `megatron-rl convert --dry-run`."""

import torch

from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import padded_vocabulary

HEADINGS = ("Hugging Face tensor", "shape", "dtype", "Megatron parameter", "sharded over processes")


def build_name_table(
    shape: ModelShape, layout: ActorLayout, dtypes: dict[str, torch.dtype]
) -> list[tuple[str, ...]]:
    """Build one row per kind of Hugging Face tensor, with layers and experts as ranges."""
    lines: list[tuple[str, ...]] = []
    for weight in shape.weights:
        sharding = _sharding(weight, shape, layout)
        for name, size in zip(weight.hf, weight_shapes(weight, shape=shape), strict=True):
            names = {str(dtypes[tensor])[6:] for tensor in _tensor_names(name, weight, shape)}
            lines.append(
                (
                    _name_with_ranges(name, weight, shape),
                    " x ".join(map(str, size)),
                    "/".join(sorted(names)),
                    weight.megatron.replace("{layer}", "i").replace("{expert}", "e"),
                    sharding,
                )
            )
    return lines


def format_table(lines: list[tuple[str, ...]]) -> str:
    """Format rows as lines with aligned columns."""
    rows = [HEADINGS, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    texts = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(text.rstrip() for text in texts)


def describe_shares(shape: ModelShape, layout: ActorLayout) -> list[str]:
    """Describe the elements per process of each pipeline stage."""
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


def _tensor_names(name: str, weight: Weight, shape: ModelShape) -> list[str]:
    layers = shape.layers_with(weight.layers) if "{layer}" in name else range(1)
    experts = range(shape.experts.num_experts if weight.part == "expert" and shape.experts else 1)
    return [name.format(layer=layer, expert=expert) for layer in layers for expert in experts]


def _name_with_ranges(name: str, weight: Weight, shape: ModelShape) -> str:
    last = shape.experts.num_experts - 1 if shape.experts else 0
    layers = shape.layers_with(weight.layers)
    return name.format(layer=f"[{layers.start}-{layers.stop - 1}]", expert=f"[0-{last}]")


def _sharding(weight: Weight, shape: ModelShape, layout: ActorLayout) -> str:
    parts = f" / {layout.tensor}" if layout.tensor > 1 else ""
    rows, columns = f"rows{parts}", f"columns{parts}"
    padded = padded_vocabulary(shape.vocab_size, tp_size=layout.tensor)
    text = {
        "replicated": "replicated",
        "vocabulary": f"{rows}, padded to {padded}",
        "rows": rows,
        "columns": columns,
        "qkv": f"{rows}, q k v of each group together",
        "gate_up": f"{rows}, gate above up",
    }[weight.cut]
    return (
        f"{text}; experts / {layout.expert}"
        if weight.part == "expert" and layout.expert > 1
        else text
    )
