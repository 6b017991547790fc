"""Contents of distributed-checkpoint folders, read without Megatron or process groups.

A run's checkpoints/step_NNNNNN/actor contains model and optimizer. torch.distributed.checkpoint
stores the table of a checkpoint's tensors as a pickle, and unpickling can run arbitrary code. Model
folders may come from untrusted sources, so the table may reference only the classes listed here.
Megatron-core's other file, common.pt, is read by `torch.load`, which refuses code itself.
"""

import enum
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight
from megatron_rl.runtime.versions import check_format

ALLOWED = {
    "torch": {"Size", "dtype", "float32", "bfloat16", "float16", "float64", "int64", "int32",
              "uint8", "bool", "int16", "int8", "strided", "contiguous_format",
              "float8_e4m3fn", "float8_e5m2"},
    "torch._C": {"dtype"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "megatron.core.dist_checkpointing.core": {"CheckpointingConfig"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict", "defaultdict"},
}  # fmt: skip


def _member(of: Any, name: str) -> Any:
    """Replace `getattr`, as which Python 3.11.0 to 3.11.3 pickle an enum member: not loaded."""
    if isinstance(of, enum.EnumMeta) and name in of.__members__:
        return of[name]
    raise UserError(f"it references {name} of {of}")


class _Plain(pickle.Unpickler):
    """Unpickler restricted to the classes of a checkpoint's table."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in ALLOWED.get(module, ()):
            raise UserError(f"it references {module}.{name}")
        return super().find_class(module, name)


def check_pickle(file: str | Path) -> None:
    """Raise ValueError if a pickled file references anything but ALLOWED classes."""
    try:
        _Plain(io.BytesIO(Path(file).read_bytes())).load()
    except (ValueError, pickle.UnpicklingError, EOFError, OSError, AttributeError) as error:
        raise UserError(
            f"{file} is not the table of a checkpoint written by this project: {error}; it was not "
            "read, because reading it could run code. Get the checkpoint from a trusted source"
        ) from error


FOLDER, CRITIC = "actor", "critic"  # in a run's checkpoint
STATE = "actor.json"
COMPLETE = "complete"


def is_checkpoint(folder: str | Path) -> bool:
    """Return True if this folder is a distributed checkpoint whose save finished."""
    return (Path(folder) / COMPLETE).is_file()


def read_state(folder: str | Path) -> dict[str, Any]:
    """Read the number of updates and the optimizer flag.

    Raises ValueError if the folder is missing, its save did not finish, or a later release wrote it
    in a format that this one cannot read.
    """
    folder = Path(folder)
    if not is_checkpoint(folder):
        problem = "is not a complete checkpoint" if folder.is_dir() else "does not exist"
        raise UserError(f"checkpoint {folder} {problem}; choose one whose save finished")
    state = {"optimizer": True, **json.loads((folder / STATE).read_text(encoding="utf-8"))}
    check_format(folder, state)
    check_pickle(folder / ".metadata")  # before it is unpickled
    return state


def check_adapters(
    folder: str | Path, *, stored: Mapping[str, Any] | None, expected: Mapping[str, Any] | None
) -> None:
    """Raise ValueError unless a checkpoint has the adapters that this actor has, or none as it."""
    if stored is None and expected is None:
        return
    if stored is None or expected is None:
        has, needs = ("weights", "adapters") if stored is None else ("adapters", "weights")
        raise UserError(
            f"checkpoint {folder} contains {has}, but this run trains {needs}; restore the section "
            "lora of the config as it was, or start a new run from the exported model"
        )
    if stored["model"] != expected["model"]:
        raise UserError(
            f"checkpoint {folder} contains adapters of another model than model.path: its weights "
            f"have fingerprint {stored['model'][:12]}, this model's {expected['model'][:12]}; set "
            "model.path to the model that the adapters were trained on"
        )
    for key in ("rank", "alpha", "targets"):
        if stored[key] != expected[key]:
            raise UserError(
                f"checkpoint {folder} contains adapters with {key} {stored[key]}, but lora.{key} "
                f"is {expected[key]}; set it to the checkpoint's"
            )


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return every tensor's shape by Megatron's key; layers are the first dimension."""
    check_pickle(Path(folder) / ".metadata")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(value.size) for key, value in stored.items() if hasattr(value, "size")}


def check_stored(folder: str | Path, shape: ModelShape) -> None:
    """Raise ValueError naming tensors that the checkpoint lacks or has in another shape.

    A checkpoint of adapters has no weights of the model to check.
    """
    if read_state(folder).get("adapters"):
        return
    stored = checkpoint_shapes(folder)
    problems = []
    for weight in shape.weights:
        if (
            weight.part == "expert"
            or "input_layernorm" in weight.megatron
            or "pre_mlp" in weight.megatron
        ):
            continue  # their keys depend on Megatron's release and the kind of MLP
        key, expected = _key_and_shape(weight, shape)
        actual = stored.get(key)
        if actual is None:
            problems.append(f"{key} is missing")
        elif actual != expected and not (
            weight.cut == "vocabulary" and _is_padded(actual, expected)
        ):
            problems.append(f"{key} has shape {actual}, but config.json requires {expected}")
    if shape.tied_embeddings and "output_layer.weight" in stored:
        problems.append("output_layer.weight exists, but config.json ties it to the embedding")
    if problems:
        raise UserError(f"checkpoint {folder} is of another model: " + "; ".join(problems))


def _is_padded(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return actual[0] > expected[0] and actual[1:] == expected[1:]


def _key_and_shape(weight: Weight, shape: ModelShape) -> tuple[str, tuple[int, ...]]:
    """Return a parameter's key and its shape over all layers, with merged tensors stacked."""
    sizes = weight_shapes(weight, shape=shape)
    whole = (sum(size[0] for size in sizes), *sizes[0][1:])
    if weight.part != "layer":
        return weight.megatron, whole
    layers = shape.layers_with(weight.layers)
    if shape.delta or (shape.layers_with("dense") and shape.experts):
        # Megatron does not stack layers that differ.
        return weight.megatron.format(layer=layers[0]), whole
    return weight.megatron.replace(".{layer}", ""), (shape.num_layers, *whole)
