"""Completeness and fingerprint of a model folder, from the headers of its safetensors files.

The format (https://huggingface.co/docs/safetensors) consists of 8 bytes with the header's length,
the header as JSON with shape, dtype and byte range of each tensor, then the data. A file from an
interrupted download is shorter than its header describes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16", "F64")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_LISTED_PROBLEMS = 3  # per message
EXPERTS_IN_ONE = ".mlp.experts.gate_up_proj"
DOWNLOAD_AGAIN = "download it again"


def find_files(folder: str | Path) -> dict[str, str]:
    """Map each tensor's name to its file; raises ValueError if the folder contains no weights."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        try:
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{index} is not an index of safetensors files ({error}); {DOWNLOAD_AGAIN}"
            ) from None
        return files
    if not (folder / SINGLE).is_file():
        others = sorted(file.name for file in folder.glob("*.bin"))
        suggestion = f"convert {others[0]} to safetensors" if others else DOWNLOAD_AGAIN
        raise UserError(
            f"{folder} contains neither {SINGLE} nor {INDEX}: no weights to load; {suggestion}"
        )
    return dict.fromkeys(read_header(folder / SINGLE), SINGLE)


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
