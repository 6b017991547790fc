"""Safety check of pickled checkpoint metadata before it is unpickled.

torch.distributed.checkpoint stores the table of a checkpoint's tensors as a pickle, and unpickling
can run arbitrary code. Model folders may come from untrusted sources, so the table may reference
only the classes listed here. Megatron-core's other file, common.pt, is read by `torch.load`, which
refuses code itself.
"""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

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
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
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
