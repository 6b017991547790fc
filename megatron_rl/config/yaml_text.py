"""YAML of config files and of `key=value`, with errors that name the file and the line.

YAML 1.1 reads off, 1e3, 007 or 2026-01-01 as a boolean, a number or a date. A setting whose type is
a text keeps what was written.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from megatron_rl.config.paths import expand_path
from megatron_rl.errors import UserError

_TEXT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "merge"))
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OLD_NUMBER = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # octal, and to base 60


class ConfigError(UserError):
    """One or more invalid settings; the message lists each of them with its fix."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that rejects duplicate keys in a mapping; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping after checking that its keys are unique."""
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue
            if key in lines:
                raise yaml.YAMLError(
                    f"{key!r} is given twice, in lines {lines[key]} and {line}; keep one"
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_mapping(
    path: str | Path, what: str = "config", model: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Read a YAML file as nested plain values; raise ConfigError if it contains no mapping.

    model: its text settings keep what was written.
    """
    path = find_file(path, what)
    try:
        node = yaml.compose(_read_text(path), Loader=yaml.SafeLoader)
        if node is not None:
            keep_texts(node, model)
        values = {} if node is None else _construct(node)
    except RecursionError:
        raise ConfigError(f"{path}: an alias (*) refers to itself; remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(_describe(error, path)) from None
    if not isinstance(values or {}, dict):
        raise ConfigError(
            f"{path} must contain a mapping of settings, not a {type(values).__name__}"
        )
    return values or {}


def find_file(path: str | Path, what: str) -> Path:
    """Return the absolute path of an existing file; ConfigError otherwise."""
    try:
        path = Path(expand_path(str(path))).absolute()
    except ValueError as error:
        raise ConfigError(f"{what} file {path}: {error}") from None
    if path.is_dir():
        own = path / "config.yaml"
        hint = f"the run's is {own}" if own.is_file() else "give the path of a YAML file"
        raise ConfigError(f"{what} file {path} is a folder; {hint}")
    if not path.exists():
        raise ConfigError(f"{what} file {path} does not exist; give the path of a YAML file")
    return path


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file "
            "as UTF-8"
        ) from None


def _construct(node: yaml.Node) -> Any:
    loader = _UniqueKeyLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _describe(error: yaml.YAMLError, path: Path) -> str:
    """Describe in one line what is wrong and where."""
    if isinstance(error, yaml.reader.ReaderError):
        before = path.read_bytes().decode("utf-8-sig")[: error.position]
        return (
            f"{path}, line {before.count(chr(10)) + 1}: not valid YAML: the character "
            f"U+{error.character:04X} is not allowed; remove it"
        )
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{path}: {error}"
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    for mark in marks:
        text = lines[mark.line] if mark.line < len(lines) else ""
        if "\t" in text[: len(text) - len(text.lstrip())]:
            return f"{path}, line {mark.line + 1}: not valid YAML: a tab; indent with spaces"
    problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    where = f", line {marks[0].line + 1}" if marks else ""
    return f"{path}{where}: not valid YAML: {problem}"


def find_line(path: str | Path, location: Sequence[int | str]) -> tuple[int, str] | None:
    """Find the line of a key in a valid file; returns its number and its text."""
    text = _read_text(Path(path))
    node, line, rest = yaml.compose(text, Loader=yaml.SafeLoader), None, list(map(str, location))
    while rest and isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            parts = str(key_node.value).split(".")
            if rest[: len(parts)] == parts:
                node, line, rest = value_node, key_node.start_mark.line, rest[len(parts) :]
                break
        else:
            break
    return None if line is None else (line + 1, text.splitlines()[line])


def parse_value(text: str, kind: Any) -> Any:
    """Parse the value of `key=value`; raise YAMLError if it is none.

    kind: type of the setting, if it is known. For a text everything is taken as it is, except for
    quotes around it, lists and mappings (which are refused later), and null where that is allowed.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        if not is_text(kind):
            raise
        return text.strip()
    if node is None:
        return text.strip() or None if is_text(kind) else None
    keep_texts(node, kind)
    if is_text(kind) and text.strip():
        is_whole = not isinstance(node, yaml.ScalarNode) or node.style or node.value == text.strip()
        if not is_whole or (isinstance(node, yaml.CollectionNode) and not node.flow_style):
            return text.strip()
    return _construct(node)


def keep_texts(node: yaml.Node, kind: Any) -> None:
    """Mark the plain scalars of text settings, and all names of settings, as texts.

    kind: type of the value, or None if it is not known.
    """
    if isinstance(node, yaml.ScalarNode):
        is_null = node.tag == _NULL and (node.value != "~" or NoneType in _kinds(kind))
        # YAML 1.1 would read 010 as 8, and 1:30 as 90; as texts they are 10 and refused.
        is_trap = node.tag in _NUMBERS and _OLD_NUMBER.fullmatch(node.value) and kind is not None
        is_kept = is_text(kind) or is_text(_item_of(kind))  # an item without its list is refused
        if node.style is None and ((is_kept and not is_null) or is_trap):
            node.tag = _TEXT
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            keep_texts(item, _item_of(kind))
    elif isinstance(node, yaml.MappingNode):
        is_named = any(
            _is_model(one) or (get_origin(one) is dict and is_text(get_args(one)[0]))
            for one in _kinds(kind)
        )
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                keep_texts(value_node, kind)
            elif isinstance(key_node, yaml.ScalarNode):
                if is_named:
                    key_node.tag = _TEXT
                keep_texts(value_node, kind_at(kind, key_node.value))


def kind_at(kind: Any, key: str) -> Any:
    """Return the type of a dotted key in a type; None if it is not known."""
    name, _, rest = key.partition(".")
    for one in _kinds(kind):
        if _is_model(one) and name in one.model_fields:
            field = one.model_fields[name].annotation
            return kind_at(field, rest) if rest else field
        if get_origin(one) is dict:  # user-chosen names may contain dots
            value = get_args(one)[1]
            return kind_at(value, rest) if rest and any(map(_is_model, _kinds(value))) else value
    return None


def is_text(kind: Any) -> bool:
    """Return True if a setting of this type takes texts, and neither numbers nor booleans."""
    kinds = [one for one in _kinds(kind) if one is not NoneType]
    return bool(kinds) and all(
        one is str
        or (get_origin(one) is Literal and all(isinstance(each, str) for each in get_args(one)))
        for one in kinds
    )


def _item_of(kind: Any) -> Any:
    """Return the type of a list's items; None if it is no list."""
    return next((get_args(one)[0] for one in _kinds(kind) if get_origin(one) is list), None)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _kinds(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, without annotations."""
    if get_origin(kind) is Annotated:
        yield from _kinds(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _kinds(one)
    elif kind is not None:
        yield kind
