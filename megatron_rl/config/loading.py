"""Load a config from YAML and `key=value` overrides, reporting all errors together."""

import difflib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_rl.config.config import Config
from megatron_rl.config.other_trainers import unknown_keys
from megatron_rl.config.paths import HUB_NAME, is_path
from megatron_rl.config.sections import PATTERNS, Section
from megatron_rl.config.yaml_text import (
    ConfigError,
    find_file,
    find_line,
    kind_at,
    parse_value,
    read_mapping,
)

ANCHOR = re.compile(r"[^#]*:\s*&")


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Load a YAML file and apply `key.path=value` overrides.

    Raises ConfigError listing every invalid key and value, those of the file with their lines.
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
MODELS = ("model.path", "model.reference", "model.teachers", "offline.behavior")


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
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form key=value, such as seed=7")
    try:
        value = parse_value(text, kind_at(Config, key))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML: {problem}"
        ) from None
    set_dotted(values, key, value)


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
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        is_here = file and key and not any(f"{key}.".startswith(f"{one}.") for one in overridden)
        line = find_line(find_file(str(file), "config"), item["loc"]) if is_here else None
        if item["type"] != "extra_forbidden":
            found = [_explain(item, model)]
        elif line and ANCHOR.match(line[1]):
            found = [
                f"{key}: unknown key; an anchor (&) belongs to a setting: write it where its value "
                "is used first, and refer to it (*) from then on"
            ]
        else:
            unknown = f"{key}: unknown key{_suggest(item['loc'], model)}"
            found = others(key, item["input"]) or [unknown]
        where = f" ({Path(str(file)).name}, line {line[0]})" if line else ""
        problems += [f"{problem}{where}" for problem in found]
    return problems


def _explain(item: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["loc"][-1:] == ("[key]",):
        return f"{key.removesuffix('.[key]')}: its name {_rule(item, model)}"
    if item["type"] == "missing":
        return f"{key}: missing; give it"
    if item["type"] == "value_error":
        message = str(item["ctx"]["error"])
        if message.startswith(key):  # it already names its key
            return message.replace("\n", "\n  ")
        return f"{key}={_shown(item['input'])}: {message}"
    return f"{key}={_shown(item['input'])}: {_rule(item, model)}"


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
