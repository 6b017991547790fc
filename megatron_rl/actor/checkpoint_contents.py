"""What a folder of distributed-checkpoint files holds, read without Megatron or process groups.

Of a run: checkpoints/step_NNNNNN/actor, with model and optimizer. Of `megatron-rl convert`: a model
folder with config and tokenizer files as from Hugging Face, whose weights lie in its actor/.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.actor.safe_pickle import check_pickle
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight

FOLDER = "actor"  # of a run's checkpoint, and of a converted model
STATE = "actor.json"
COMPLETE = "complete"


def is_checkpoint(folder: str | Path) -> bool:
    """Whether this folder holds distributed-checkpoint files whose save has finished."""
    return (Path(folder) / COMPLETE).is_file()


def read_state(folder: str | Path) -> dict[str, Any]:
    """Updates done so far, whether there is an optimizer, and dtypes of a converted model.

    Raises ValueError when the folder is missing or its save did not finish.
    """
    folder = Path(folder)
    if not is_checkpoint(folder):
        problem = "is not a complete checkpoint" if folder.is_dir() else "does not exist"
        raise ValueError(f"checkpoint {folder} {problem}; choose one whose save finished")
    check_pickle(folder / ".metadata")  # before anybody reads it
    return {"optimizer": True, **json.loads((folder / STATE).read_text())}


def stored_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by Megatron's key: layers are its first dimension."""
    check_pickle(Path(folder) / ".metadata")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(value.size) for key, value in stored.items() if hasattr(value, "size")}


def check_stored(folder: str | Path, shape: ModelShape) -> None:
    """Raise ValueError naming the tensors that a checkpoint lacks, or holds of another model."""
    read_state(folder)
    found = stored_shapes(folder)
    problems = []
    for weight in shape.weights:
        if (
            weight.part == "expert"
            or "input_layernorm" in weight.megatron
            or "pre_mlp" in weight.megatron
        ):
            continue  # Megatron's keys of these depend on its release and the kind of MLP
        key, wanted = _key_and_shape(weight, shape)
        has = found.get(key)
        if has is None:
            problems.append(f"{key} is missing")
        elif has != wanted and not (weight.cut == "vocabulary" and _is_padded(has, wanted)):
            problems.append(f"{key} has shape {has}, config.json says {wanted}")
    if shape.tied_embeddings and "output_layer.weight" in found:
        problems.append("output_layer.weight is there, but config.json ties it to the embedding")
    if problems:
        raise ValueError(f"checkpoint {folder} is of another model: " + "; ".join(problems))


def _is_padded(has: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return has[0] > wanted[0] and has[1:] == wanted[1:]


def _key_and_shape(weight: Weight, shape: ModelShape) -> tuple[str, tuple[int, ...]]:
    """The key of one kind of parameter and its shape over all layers, merged tensors stacked."""
    sizes = weight_shapes(weight, shape=shape)
    whole = (sum(size[0] for size in sizes), *sizes[0][1:])
    if weight.part != "layer":
        return weight.megatron, whole
    return weight.megatron.replace(".{layer}", ""), (shape.num_layers, *whole)


def read_dtypes(folder: str | Path) -> dict[str, torch.dtype]:
    """The dtype that each Hugging Face tensor of a converted model had."""
    names = read_state(folder).get("dtypes")
    if names is None:
        raise ValueError(f"checkpoint {folder} is a run's; it does not state its tensors' dtypes")
    return {name: getattr(torch, dtype) for name, dtype in names.items()}
