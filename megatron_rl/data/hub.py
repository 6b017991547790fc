"""Prompt sets that the library `datasets` reads: of the Hugging Face hub, or saved on the disk.

`hf:OWNER/NAME` is the split `train` of a data set on the hub, `hf:OWNER/NAME:SPLIT` another one,
`hf:OWNER/NAME/CONFIG` one configuration. It is taken from the cache of `datasets` where it is
there, and fetched only where HF_HUB_OFFLINE=0 is set. A folder is what
`Dataset.save_to_disk` wrote.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HUB = "hf:"


def is_on_hub(path: str | Path) -> bool:
    """Whether this names a data set instead of a file."""
    return str(path).startswith(HUB)


def read_hub(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of `hf:OWNER/NAME[/CONFIG][:SPLIT]`; ValueError where they are not to be had."""
    name, _, split = str(path).removeprefix(HUB).partition(":")
    owner, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    if not repository:
        raise ValueError(f"{path}: a data set of the hub is named {HUB}OWNER/NAME")
    library = _datasets(path)
    try:
        found = library.load_dataset(
            f"{owner}/{repository}", config or None, split=split or "train"
        )
    except Exception as error:  # the library raises a dozen kinds
        raise ValueError(
            f"{path} cannot be loaded: {error}; fetch it once by HF_HUB_OFFLINE=0 where there is a "
            "network, or give a file"
        ) from error
    yield from enumerate(found)


def read_saved(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a folder that `datasets` saved; of several splits, `train`."""
    library = _datasets(path)
    try:
        found = library.load_from_disk(str(path))
    except Exception as error:
        raise ValueError(
            f"{path} is a folder that `datasets` cannot load: {error}; give a .parquet or .jsonl "
            "file, or what Dataset.save_to_disk has written"
        ) from error
    if isinstance(found, library.DatasetDict):
        if "train" not in found:
            raise ValueError(f"{path} has the splits {', '.join(found)}; give the folder of one")
        found = found["train"]
    yield from enumerate(found)


def _datasets(path: Path) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{path}: reading it needs the library datasets; pip install it"
        ) from error
    return datasets
