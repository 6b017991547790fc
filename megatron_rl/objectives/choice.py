"""From a name and overrides, as they stand in a configuration, to a choice; needs no torch."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.spec import CONSTRAINTS, OaplSpec, ObjectiveSpec

OBJECTIVES: dict[str, ObjectiveSpec | OaplSpec] = {**NAMED, "oapl": OaplSpec()}
OBJECTIVE_NAMES = tuple(OBJECTIVES)


def choose_objective(name: str, overrides: Mapping[str, Any]) -> ObjectiveSpec | OaplSpec:
    """The named choice with some of its fields replaced by plain values.

    `constraint` is a mapping: with a `kind` ("ppo_clip", "hard_gate", "truncate", "tv_filter",
    "none") it is the whole new constraint, without one it replaces fields of the objective's
    own. `kl` and `rollout_correction` are mappings of their fields. Raises ValueError naming the
    nearest known word.
    """
    _check_known(name, OBJECTIVES, "unknown objective")
    default, where = OBJECTIVES[name], f"objective {name!r}"
    for key in overrides:
        _check_known(key, [*get_type_hints(type(default)), "name"], f"{where} has no option")
    choice: ObjectiveSpec | OaplSpec = _replace(default, overrides, where)
    return choice


def _replace(default: Any, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass, or a new one if `default` is a class, with the fields in `values`."""
    cls = default if isinstance(default, type) else type(default)
    types = get_type_hints(cls)
    for key in values:
        _check_known(key, types, f"{where} has no option")
    read = {
        key: _read(value, types[key], getattr(default, key, None), where, key)
        for key, value in values.items()
    }
    if cls is default:
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in read:
                raise ValueError(f"{where} needs {field.name!r}")
    try:
        return cls(**read) if cls is default else dataclasses.replace(default, **read)
    except ValueError as wrong:
        raise ValueError(f"{where}: {wrong}") from None


def _read(value: Any, declared: Any, current: Any, where: str, key: str) -> Any:
    """A plain value as a field's declared type wants it; the field's owner checks what it means."""
    types = get_args(declared) or (declared,)
    classes = [cls for cls in types if dataclasses.is_dataclass(cls)]
    if classes:
        if len(classes) == 1:
            return _replace(classes[0], value, key) if isinstance(value, Mapping) else value
        return _read_kind(value, current, key)
    if isinstance(value, str) and float in types:  # YAML 1.1 reads 7e-4, without a point, as text
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{where}: {key} is {value!r}: it must be a number") from None
    return value


def _read_kind(value: Any, current: Any, key: str) -> Any:
    """One of several constraints, chosen by its kind, or the current one with other fields."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return value
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind is None:
        return _replace(current, fields, f"{key} {type(current).__name__}")
    _check_known(str(kind), CONSTRAINTS, f"unknown {key} kind")
    return _replace(CONSTRAINTS[kind], fields, f"{key} {kind}")


def _check_known(word: str, known: Iterable[str], problem: str) -> None:
    known = sorted(known)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{problem} {word!r}{hint} (known: {', '.join(known)})")
