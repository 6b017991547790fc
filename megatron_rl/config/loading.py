"""Reading a config: YAML plus `key=value` overrides, every error at once with its cure."""

import difflib
import os
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_rl.config.config import Config
from megatron_rl.config.sections import Section


class ConfigError(ValueError):
    """One or more settings are wrong; the message lists every one of them with its cure."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The config in a YAML file with `key.path=value` overrides applied.

    Raises ConfigError listing every wrong key and value.
    """
    values = read_mapping(path)
    for override in overrides or []:
        apply_override(values, override)
    return parse_config(values)


def read_mapping(path: str | Path, what: str = "config") -> dict[str, Any]:
    """The nested plain values of a YAML file; ConfigError where it is no file of that kind."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{what} file {path} does not exist; give the path of a YAML file")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(values).__name__}")
    return values


def parse_config(values: dict[str, Any]) -> Config:
    """A Config from nested plain values; raises ConfigError listing every wrong key and value."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("wrong config:\n  " + "\n  ".join(explain(error))) from None


def with_absolute_paths(config: Config) -> Config:
    """The config with the paths of what exists made absolute: they then hold in every folder."""

    def absolute(path: str | None) -> str | None:
        return os.path.abspath(path) if path and os.path.exists(path) else path

    values = config.model_dump()
    values["run"]["dir"] = os.path.abspath(config.run.dir)
    for section, key in (
        ("model", "path"), ("model", "reference"), ("data", "train"),
        ("offline", "rollouts"), ("offline", "behavior"),
    ):  # fmt: skip
        if (section, values[section][key]) != ("offline", "file"):  # a word there, no path
            values[section][key] = absolute(values[section][key])
    for one in values["data"]["mix"].values():
        one["path"] = absolute(one["path"])
    if isinstance(lags := values["lag"]["batches"], dict) and "trace" in lags:
        lags["trace"] = absolute(str(lags["trace"]))
    values["eval"]["sets"] = {
        name: dict(one) | {"path": absolute(one.path)} for name, one in config.eval.sets.items()
    }
    return parse_config(values)


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to the same Config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, in order."""
    keys = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        keys += valid_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put `key.path=value` into nested plain values; ConfigError where it is not of that form."""
    key, equals, text = override.partition("=")
    parts = key.strip().lstrip("-").split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key=value, as in seed=7")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    put(values, ".".join(parts), value)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under a dotted key into nested plain values."""
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value


def explain(error: ValidationError, model: type[BaseModel] = Config) -> list[str]:
    """Every wrong key and value of a model's input, each with its cure."""
    return [_explain(item, model) for item in error.errors()]


def _explain(item: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggest(key, model)}"
    if item["type"] == "missing":
        return f"{key}: missing; give it"
    if item["type"] == "value_error" and not key:
        return str(item["ctx"]["error"]).replace("\n", "\n  ")
    said = item["msg"].removeprefix("Value error, ")
    # A pattern in it is as it is: only the first letter becomes small.
    return f"{key}={item['input']!r}: {said[:1].lower()}{said[1:]}"


def _suggest(key: str, model: type[BaseModel]) -> str:
    section, _, last = key.rpartition(".")
    every = valid_keys(model)
    siblings = [name for name in every if section and name.startswith(f"{section}.")]
    if siblings:
        words = {name.removeprefix(f"{section}."): name for name in siblings}
        near = [words[word] for word in difflib.get_close_matches(last, words, n=1)]
    else:
        near = difflib.get_close_matches(key, [*model.model_fields, *every], n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; valid here: {', '.join(siblings or model.model_fields)}"
