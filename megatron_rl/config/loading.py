"""Load a config from YAML and `key=value` overrides, reporting all errors together.

YAML 1.1 reads off, 1e3, 007 or 2026-01-01 as a boolean, a number or a date. A setting whose type is
a text keeps what was written.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_rl.config.config import Config
from megatron_rl.config.other_trainers import unknown_keys
from megatron_rl.config.sections import HUB_NAME, PATTERNS, Section, expand_path, is_path
from megatron_rl.errors import UserError

_TEXT, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "merge"))
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_EMPTY = "is empty, which would mean null; write null, or a value"
_OLD_NUMBER = re.compile(r"[-+]?0[0-9_]+|.*:.*")  # octal, and to base 60


class ConfigError(UserError):
    """One or more invalid settings; the message lists each of them with its fix."""


class EmptyValueError(yaml.MarkedYAMLError):
    """A setting without a value, where null turns something off."""


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
        raise ConfigError(
            f"{path}: an alias (*) refers to itself, or nesting is too deep; remove it"
        ) from None
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
    if isinstance(error, EmptyValueError):
        return f"{path}{where}: {problem}"
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

    kind: type of the value, or None if it is not known. Raises EmptyValueError.
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
                inner = kind_at(kind, key_node.value)
                if _is_empty(value_node) and _needs_word(inner):
                    problem = f"{key_node.value} {_EMPTY}"
                    raise EmptyValueError(problem=problem, problem_mark=key_node.start_mark)
                keep_texts(value_node, inner)


def _is_empty(node: yaml.Node) -> bool:
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return is_plain and not node.value and node.tag == _NULL


def _needs_word(kind: Any) -> bool:
    """Return True where null turns something off and must be written; a mapping may be empty."""
    kinds = tuple(_kinds(kind))
    return NoneType in kinds and not any(get_origin(one) is dict for one in kinds)


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


ANCHOR = re.compile(r"[^#]*:\s*&")


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Load a YAML file and apply `key.path=value` overrides.

    Raises ConfigError listing every invalid key and value; keys of the file have their line
    numbers.
    """
    values = read_config_values(path)
    for override in overrides or []:
        apply_override(values, override)
    given = tuple(override.partition("=")[0].strip().lstrip("-") for override in overrides or [])
    return _validate(values, file=path, overridden=given)


def read_config_values(path: str | Path) -> dict[str, Any]:
    """Read a config file as nested plain values, with dotted keys expanded as in overrides."""
    return expand_dotted_keys(read_mapping(path, model=Config))


def expand_dotted_keys(
    values: dict[str, Any], section: type[BaseModel] = Config, prefix: str = ""
) -> dict[str, Any]:
    """Expand dotted keys: `model.path: x` becomes `model: {path: x}`.

    Only names of settings are split: user-chosen names (in `eval.sets`) keep their dots. Raises
    ConfigError for a setting that is given in both forms.
    """
    result: dict[str, Any] = {}
    for key, given in values.items():
        first, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        inner = _section_of(section.model_fields[first]) if first in section.model_fields else None
        value = {rest: given} if dot else long_form(f"{prefix}{first}", given)
        if inner and isinstance(value, dict):
            value = expand_dotted_keys(value, inner, f"{prefix}{first}.")
        elif dot:
            set_dotted(value := {}, rest, given)
        result[first] = _merge(result[first], value, prefix + first) if first in result else value
    return result


def _merge(first: Any, second: Any, key: str) -> Any:
    """Merge two nested mappings; raise ConfigError if both set the same key."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        raise ConfigError(f"{key} is given twice, with and without dots in its key; keep one")
    return first | {
        name: _merge(first[name], value, f"{key}.{name}") if name in first else value
        for name, value in second.items()
    }


def parse_config(values: dict[str, Any]) -> Config:
    """Build a Config from nested plain values; raise ConfigError listing every invalid setting."""
    return _validate(values)


def _validate(values: dict[str, Any], **where: Any) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = explain(error, others=unknown_keys, **where)
        raise ConfigError("invalid config:\n  " + "\n  ".join(problems)) from None


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, so that they are valid everywhere.

    Names of models on the hub stay, unless a folder here has that name.
    """
    values = config.model_dump()
    _make_absolute(values, Config, "")
    return parse_config(values)


# names on the hub are valid, too
MODELS = ("model.path", "model.reference", "offline.behavior", "critic.path")


def _make_absolute(values: dict[str, Any], section: type[BaseModel], prefix: str) -> None:
    for name, field in section.model_fields.items():
        if name not in values:  # trainer.steps, with data.epochs
            continue
        key, value = f"{prefix}{name}", values[name]
        if (inner := _section_of(field)) and value is not None:
            _make_absolute(value, inner, f"{key}.")
        elif inner := _section_of(field, named=True):
            for name_of_set, item in value.items():
                if isinstance(item, str):  # the path alone, in eval.sets
                    value[name_of_set] = _absolute(item, key)
                else:
                    _make_absolute(item, inner, f"{key}.{name_of_set}.")
        elif value and is_path(field.annotation, field.metadata):
            paths = value if isinstance(value, dict) else {"": value}
            paths = {one: _absolute(path, key) for one, path in paths.items()}
            values[name] = paths if isinstance(value, dict) else paths[""]


def _absolute(path: str, key: str) -> str:
    is_name = key in MODELS and HUB_NAME.fullmatch(path) and not os.path.exists(path)
    is_keyword = (key, path) == ("offline.behavior", "file")
    if is_name or is_keyword or path.startswith("hf:"):
        return path
    return os.path.abspath(path)


def dump_config(config: Config) -> str:
    """Serialize the resolved config as YAML that `load_config` reads back unchanged."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """List every dotted key of the config, in order."""
    keys = []
    for name, field in section.model_fields.items():
        inner = _section_of(field) or _section_of(field, named=True)
        keys += valid_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _section_of(field: FieldInfo, *, named: bool = False) -> type[Section] | None:
    """The section class of a field; with named, the class of a field that maps names to them."""
    is_named = get_origin(field.annotation) is dict
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section) and named == is_named:
            return candidate
    return None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Apply `key.path=value` to nested plain values; raise ConfigError for any other form."""
    key, equals, text = override.partition("=")
    key = key.strip().lstrip("-")
    if (plain := key.lstrip("+~")) != key and not unknown_keys(plain, text):
        cure = f"write {plain}={text}" if key[0] == "+" else f"leave {plain} out"
        raise ConfigError(f"override {override!r}: {key[0]} is Hydra's and not known here; {cure}")
    key = plain
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form key=value, such as seed=7")
    kind = kind_at(Config, key)
    if not text.strip() and _needs_word(kind):
        raise ConfigError(f"override {override!r}: {key} {_EMPTY}")
    try:
        value = parse_value(text, kind)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML: {problem}"
        ) from None
    _check_nothing_is_dropped(values, key, value, override)
    set_dotted(values, key, value)


def _check_nothing_is_dropped(values: dict[str, Any], key: str, value: Any, override: str) -> None:
    """Raise ConfigError if a mapping replaces a section of which other settings are given.

    An objective is chosen as a whole, and {} means all defaults.
    """
    current = value_at(values, key)
    if value and key != "objective" and (lost := _dropped(current, value, kind_at(Config, key))):
        names = ", ".join(f"{key}.{one}" for one in lost)
        own = " ".join(f"{key}.{name}=..." for name in value)
        raise ConfigError(
            f"override {override!r} would drop {names}, which the file or an earlier override "
            f"gives; write {own}, or give them in it too"
        )


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested plain values; None if it is not given."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _dropped(current: Any, value: Any, kind: Any) -> list[str]:
    """Return the keys of a section that a mapping in its place does not have."""
    is_section = any(map(_is_model, _kinds(kind)))
    if not (is_section and isinstance(current, dict) and isinstance(value, dict)):
        return []
    lost = [
        name for name in current if name not in value and current[name] != _default_at(kind, name)
    ]
    for name in current.keys() & value.keys():
        inner = _dropped(current[name], value[name], kind_at(kind, name))
        lost += [f"{name}.{one}" for one in inner]
    return lost


def _default_at(kind: Any, name: str) -> Any:
    """Return the default of a section's setting, as nested plain values."""
    for one in filter(_is_model, _kinds(kind)):
        if name in one.model_fields:
            default = one.model_fields[name].get_default(call_default_factory=True)
            return default.model_dump() if isinstance(default, BaseModel) else default
    return None


def long_form(key: str, value: Any) -> Any:
    """Expand a shorthand text to its mapping: an objective's name, an evaluation set's path."""
    if isinstance(value, str) and key == "objective":
        return {"name": value}
    if isinstance(value, str) and key.rpartition(".")[0] == "eval.sets":
        return {"path": value}
    return value


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested plain values."""
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        current = long_form(".".join(parents[: depth + 1]), values.get(part))
        values[part] = current if isinstance(current, dict) else {}
        values = values[part]
    values[last] = value


def explain(
    error: ValidationError,
    model: type[BaseModel] = Config,
    *,
    file: str | Path | None = None,
    overridden: tuple[str, ...] = (),
    others: Callable[[str, Any], list[str]] = lambda key, value: [],
) -> list[str]:
    """Describe every invalid key and value of a model's input, each with its fix.

    file: file with the values, except for those of the keys `overridden`; its lines are named.
    others: returns messages about an unknown key of another program.
    """
    problems = []
    by_place: dict[tuple[int | str, ...], list[Any]] = {}
    for item in error.errors():
        by_place.setdefault(_place(item["loc"], model), []).append(item)
    for place, items in by_place.items():
        item = items[0] | {"loc": place}
        key = ".".join(str(part) for part in place)
        is_over = any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.")
                      for one in overridden)  # fmt: skip
        is_here = file and key and not is_over
        line = find_line(find_file(str(file), "config"), item["loc"]) if is_here else None
        if item["type"] != "extra_forbidden":
            rules = [_rule(item, model) for item in items]
            found = [_explain(item, _either(rules))]
        elif line and ANCHOR.match(line[1]):
            found = [
                f"{key}: unknown key; an anchor (&) belongs to a setting: write it where its value "
                "is used first, and refer to it (*) from then on"
            ]
        elif re.search(r":[\s\[{\"']", key) or "\u00a0" in key:
            found = [f"{key!r}: unknown key; write an ordinary space after the colon"]
        else:
            unknown = f"{key}: unknown key{_suggest(item['loc'], model)}"
            found = others(key, item["input"]) or [unknown]
        where = f" ({Path(str(file)).name}, line {line[0]})" if line else ""
        problems += [f"{problem}{where}" for problem in found]
    return problems


def _place(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[int | str, ...]:
    """Cut a location behind a setting of several types: pydantic adds the type that it tried."""
    for end in range(1, len(location)):
        field = _fields_at(location[: end - 1], model).get(str(location[end - 1]))
        kind = field.annotation if field else None
        if get_origin(kind) in (Union, UnionType) and len({*get_args(kind)} - {NoneType}) > 1:
            return location[:end]
    return location


def _either(rules: list[str]) -> str:
    """Join the rules of the types that a setting may have."""
    return ", or ".join([rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])])


def _explain(item: Any, rule: str) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["loc"][-1:] == ("[key]",):
        return f"{key.removesuffix('.[key]')}: its name {rule}"
    if item["type"] == "missing":
        return f"{key}: missing; give it"
    if item["type"] == "value_error":
        message = str(item["ctx"]["error"])
        if message.startswith(key):  # it already names its key
            return message.replace("\n", "\n  ")
        return f"{key}={_shown(item['input'])}: {message}"
    return f"{key}={_shown(item['input'])}: {rule}"


def _shown(value: Any) -> str:
    """Format a value as in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


_RULES = {
    "bool": "must be true or false", "int": "must be a whole number", "float": "must be a number",
    "string_type": "must be a text; put it in quotes", "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}", "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}", "finite_number": "must be a finite number",
    "literal_error": "must be {expected}", "too_short": "must have at least {min_length}",
}  # fmt: skip


def _rule(item: Any, model: type[BaseModel]) -> str:
    """Describe the valid values in plain words, or else in pydantic's."""
    kind, value = item["type"], item["input"]
    if kind == "string_pattern_mismatch":
        return PATTERNS[item["ctx"]["pattern"]]
    if kind == "string_type" and isinstance(value, list | dict):
        given = "a list" if isinstance(value, list) else "a mapping"
        return f"must be a text, not {given}; give the text alone"
    if kind == "list_type":
        return f"must be a list, such as [{value}]"
    if kind in ("model_type", "dict_type"):
        fields = _fields_at(item["loc"], model)
        example = ", ".join(f"{name}: ..." for name in list(fields)[:2]) or "name: value"
        keys = f" of {', '.join(fields)}" if fields else ""
        return f"must be a mapping{keys}, such as {{{example}}}"
    for start in (kind, kind.partition("_")[0]):
        if start in _RULES:
            return _RULES[start].format(**item.get("ctx", {}))
    message = item["msg"]
    return f"{message[:1].lower()}{message[1:]}"  # keeps the case of a pattern in the message


def _fields_at(location: Sequence[int | str], model: type[BaseModel]) -> dict[str, Any]:
    """The fields of the section at a location in a model; empty if it is not a section."""
    parts = iter(location)
    for part in parts:
        field = model.model_fields.get(str(part))
        inner = field and _section_of(field)
        if field and not inner and next(parts, None) is not None:
            inner = _section_of(field, named=True)
        if not inner:
            return {}
        model = inner
    return dict(model.model_fields)


def _suggest(location: Sequence[int | str], model: type[BaseModel]) -> str:
    *section, last = location
    prefix = "".join(f"{part}." for part in section)
    siblings = _fields_at(section, model)
    keys = list(siblings)
    if not section:  # possibly the key of a section
        named = {name.rpartition(".")[2]: name for name in reversed(valid_keys(model))}
        siblings = named | siblings
    if near := difflib.get_close_matches(str(last), siblings, n=1, cutoff=0.7):
        key = siblings[near[0]] if isinstance(siblings[near[0]], str) else near[0]
        return f"; did you mean {prefix}{key}?"
    return f"; valid here: {', '.join(f'{prefix}{name}' for name in keys)}"
