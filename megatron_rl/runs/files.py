"""Atomic writes: a file appears under its name only when it is complete."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yield a path to write; it replaces `file` atomically, even across a kill or a power cut."""
    partial = file.with_name(f".{file.name}.partial")
    yield partial
    flush_to_disk(partial)  # otherwise the name may reach the disk before the content
    os.replace(partial, file)
    flush_to_disk(file.parent)


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's text atomically."""
    with written_whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Flush writes to a file, or renames in a folder, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
