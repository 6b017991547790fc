"""Folders that a program makes once, and the command line of its settings."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any


def make_folder_once(
    output: Path,
    stamp: dict[str, Any],
    make: Callable[[Path], dict[str, Any]],
    summary: str,
    report: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Make a folder unless it exists with the same stamp; return the content of its made.json.

    The folder gets its name only when it is complete. `summary` is formatted with made.json and
    printed. Raises ValueError if `output` contains other files.
    """
    file, name = output / "made.json", summary.partition(":")[0]
    if file.is_file():
        made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if all(made.get(key) == value for key, value in stamp.items()):
            report(f"{name}: already in {output}")
            return made
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and contains no {name}; choose another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as parent:
        folder = Path(parent) / "made"
        folder.mkdir()
        made = stamp | make(folder)
        (folder / file.name).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    report(f"{summary.format(**made)}, in {output} ({made['seconds']:.0f} s)")
    return made


def settings_parser(settings: Any, output: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with one option per setting, and the output folder."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(output))
    for field in fields(settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    return parser
