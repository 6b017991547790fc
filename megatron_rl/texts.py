"""Replacement of lone surrogates (halves of a character), which UTF-8 cannot encode."""

from typing import Any


def clean(value: Any) -> Any:
    """Replace each lone surrogate in the texts of a nested value by `?`.

    They come from JSON that was truncated inside an emoji, such as `"\\ud83d"`; parquet files,
    tokenizers and logs reject them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
