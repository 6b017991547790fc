"""Completeness and fingerprint of a model folder, from the headers of its safetensors files.

The format (https://huggingface.co/docs/safetensors) consists of 8 bytes with the header's length,
the header as JSON with shape, dtype and byte range of each tensor, then the data. A file from an
interrupted download is shorter than its header describes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF_ORIGIN = "read_from_gguf.json"  # in a folder that was read from a GGUF file: which file
FLOATS = ("F32", "F16", "BF16", "F64")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_LISTED_PROBLEMS = 3  # per message
EXPERTS_IN_ONE = ".mlp.experts.gate_up_proj"
DOWNLOAD_AGAIN = "download it again"


def find_files(folder: str | Path) -> dict[str, str]:
    """Map each tensor's name to its file; raises ValueError if the folder contains no weights.

    A whole file is read if the shards of an index are gone, as by transformers. Both together may
    have other values, so they are refused.
    """
    folder = Path(folder)
    whole = (folder / SINGLE).is_file()
    if (folder / INDEX).is_file():
        files = _read_index(folder / INDEX)
        if not whole:
            return files
        if stale_index(folder) is None:
            twice = [
                name for name in read_header(folder / SINGLE) if files.get(name, SINGLE) != SINGLE
            ]
            if twice:
                raise UserError(
                    f"{folder} has {twice[0]} twice, in {SINGLE} and, by {INDEX}, in "
                    f"{files[twice[0]]}: transformers reads the first, vLLM the second; move away "
                    f"{SINGLE}, or {INDEX} and the files that it names"
                )
            return files
    if not whole:
        raise UserError(
            f"{folder} contains neither {SINGLE} nor {INDEX}: no weights to load; "
            f"{_other_weights(folder)}"
        )
    return dict.fromkeys(read_header(folder / SINGLE), SINGLE)


def stale_index(folder: str | Path) -> str | None:
    """Explain that an index is not followed: files that it names are gone, but all are in one."""
    folder = Path(folder)
    if not (folder / INDEX).is_file() or not (folder / SINGLE).is_file():
        return None
    files = set(_read_index(folder / INDEX).values())
    gone = sorted(name for name in files if not (folder / name).is_file())
    if not gone:
        return None
    return (
        f"{folder}: {INDEX} names {len(gone)} files that are not there ({gone[0]}, ...); "
        f"{SINGLE} is read instead, as by transformers; remove the index"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{index} is not an index of safetensors files ({error}); {DOWNLOAD_AGAIN}"
        ) from None
    return files


def _other_weights(folder: Path) -> str:
    """Suggest what to do with a folder by the files that it has instead of weights."""
    names = sorted(file.name for file in folder.glob("*")) if folder.is_dir() else []
    if any(name.startswith("adapter_") for name in names):
        return "it has an adapter: merge it into its base model (peft's merge_and_unload), and save"
    if "model_index.json" in names:
        return "it is a pipeline of several models; give the folder of a language model"
    stored = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".safetensors", ".distcp", ".npz", ".h5")
    found = [name for name in names if name.endswith(stored)]
    return f"convert {found[0]} to {SINGLE}" if found else DOWNLOAD_AGAIN


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Read the header entry of each tensor; raises ValueError if the file is incomplete."""
    if not path.is_file():
        raise UserError(f"{path} is listed in {INDEX} but does not exist; {DOWNLOAD_AGAIN}")
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise UserError(
                f"{path} is a Git LFS pointer instead of the weights; fetch them with git lfs pull"
            )
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path} is not a complete safetensors file ({size:,} bytes); {DOWNLOAD_AGAIN}"
            )
        try:
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            data_ends = (entry["data_offsets"][1] for entry in header.values())
            end = 8 + length + max(data_ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} has no safetensors header; {DOWNLOAD_AGAIN}") from None
    if size != end:
        raise UserError(
            f"{path} is not a complete safetensors file: it has {size:,} bytes, but its header "
            f"describes {end:,}; {DOWNLOAD_AGAIN}"
        )
    return header


def format_problems(problems: list[str]) -> str:
    """Join the first problems, and count the rest."""
    rest = len(problems) - MAX_LISTED_PROBLEMS
    listed = "; ".join(problems[:MAX_LISTED_PROBLEMS])
    return listed + (f"; and {rest} more" if rest > 0 else "")


SAMPLE = 1 << 16  # bytes
SAMPLES = 64  # evenly spread over each weights file; smaller files are read whole
_KINDS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}


def read_values(path: Path, entry: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield a tensor's values in pieces, as float64; of a large tensor evenly spread samples."""
    kind, (start, end) = np.dtype(_KINDS[entry["dtype"]]), entry["data_offsets"]
    count = (end - start) // kind.itemsize
    step = max(1, -(-count // SAMPLES))  # the same pieces of tensors of other dtypes
    with path.open("rb") as stream:
        first = 8 + int.from_bytes(stream.read(8), "little") + start
        for place in range(0, count, step):
            stream.seek(first + place * kind.itemsize)
            size = min(step, SAMPLE, count - place)
            found = np.frombuffer(stream.read(size * kind.itemsize), kind)
            if entry["dtype"] == "BF16":
                found = (found.astype("<u4") << 16).view("<f4")
            yield found.astype(np.float64)


def model_fingerprint(folder: str | Path) -> str:
    """Hash config.json and the sizes and samples of the weights; independent of the folder's path.

    Training changes nearly every value, so a few megabytes per file are enough to
    detect a different model.
    """
    folder = Path(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        add_samples(file, digest)
    return digest.hexdigest()


def add_samples(file: Path, digest: "hashlib._Hash") -> None:
    """Add the name, the size and samples of a weights file to a digest."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        if size <= SAMPLE * SAMPLES:
            digest.update(stream.read())
            return
        for index in range(SAMPLES):
            stream.seek((size - SAMPLE) * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE))
