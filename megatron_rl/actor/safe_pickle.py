"""Whether a pickled file holds plain data, before anything unpickles it.

torch.distributed.checkpoint keeps the table of a checkpoint's tensors as a pickle, and unpickling
runs whatever code a file names. A model folder may come from anywhere: what its table names must be
the few classes that such a table is made of. Megatron-core's other file, common.pt, is read by
`torch.load`, which refuses code by itself.
"""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

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
    """What stands for `getattr`, by which Python 3.11.0 to 3.11.3 name a member of an enum."""
    if isinstance(of, enum.EnumMeta) and name in of.__members__:
        return of[name]
    raise ValueError(f"it names {name} of {of}")


class _Plain(pickle.Unpickler):
    """Makes only what a checkpoint's table is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in ALLOWED.get(module, ()):
            raise ValueError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_pickle(file: str | Path) -> None:
    """Raise ValueError if unpickling a file would run code that a checkpoint's table has not."""
    try:
        _Plain(io.BytesIO(Path(file).read_bytes())).load()
    except (ValueError, pickle.UnpicklingError, EOFError, OSError, AttributeError) as error:
        raise ValueError(
            f"{file} is not the table of a checkpoint that this project writes: {error}; it is not "
            "read, since reading it could run code. Get the checkpoint from where you trust it"
        ) from error
