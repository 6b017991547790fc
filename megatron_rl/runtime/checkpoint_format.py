"""The format of checkpoint folders, which each of them names with the release that wrote it."""

from collections.abc import Mapping
from typing import Any

from megatron_rl import __version__
from megatron_rl.errors import UserError

# Raised when earlier releases could not read a folder; 0: folders that name none; 2: keys of the
# optimizer without the number of the one that Megatron-core chains for experts.
FORMAT = 2


def stamp(**releases: str) -> dict[str, Any]:
    """Return the format and the release of this package; `releases` are of other packages."""
    return {"format": FORMAT, "megatron_rl": __version__, **releases}


def check_format(folder: object, state: Mapping[str, Any]) -> None:
    """Raise UserError if a later release wrote a folder in a format that this one cannot read."""
    written = state.get("format", 0)
    if not isinstance(written, int) or written > FORMAT:
        writer = state.get("megatron_rl", "of an unknown version")
        raise UserError(
            f"{folder} has checkpoint format {written}, written by megatron_rl {writer}, and "
            f"megatron_rl {__version__} reads formats up to {FORMAT}; use that release or a later "
            "one"
        )
