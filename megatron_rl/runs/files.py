"""Files that take their name when they are whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Where to write what replaces a file: a kill leaves the old or the new one, never a part."""
    partial = file.with_name(f".{file.name}.partial")
    yield partial
    os.replace(partial, file)


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's text."""
    with written_whole(file) as partial:
        partial.write_text(text)
