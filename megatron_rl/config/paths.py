"""Paths in settings: `~` and environment variables are replaced when a config is read.

A setting whose type is `PathText` is a path: it is expanded when it is validated, on the machine
on which the command was started, and `with_absolute_paths` makes it absolute.
"""

import os
import re
from typing import Annotated, Any, get_args

from pydantic import AfterValidator

# OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face hub; a relative path may look like one
HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w.-]+))?")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})")
_IS_PATH = object()  # in the metadata of a setting


def expand_path(text: str) -> str:
    """Replace `~`, `~user`, `$NAME` and `${NAME}` as a shell does.

    Raises ValueError for a variable that is not set or empty, for another form of `${...}` and for
    an unknown user. The `$` in the name of an existing file is left as it is.
    """
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            raise ValueError(
                f"there is no home folder of {text.partition('/')[0]}; give the path in full, or "
                "./ in front of a name that begins with ~"
            )
        text = expanded
    return text if "$" not in text or os.path.lexists(text) else _VARIABLE.sub(_value, text)


def _value(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"{match[0]} is not replaced in paths, only $NAME and ${{NAME}}")
    if not (value := os.environ.get(name)):
        raise ValueError(
            f"the environment variable {name} is not set or empty; export it, or give the path in "
            "full"
        )
    return value


PathText = Annotated[str, AfterValidator(expand_path), _IS_PATH]


def is_path(annotation: Any, metadata: list[Any]) -> bool:
    """Return True for `PathText` and for `PathText | None`."""
    kinds = (annotation, *get_args(annotation))
    return any(_IS_PATH in (*metadata, *getattr(kind, "__metadata__", ())) for kind in kinds)
