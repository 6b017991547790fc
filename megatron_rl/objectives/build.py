"""From a name and overrides, as they stand in a configuration, to an objective."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.objective import Objective, PolicyObjective
from megatron_rl.objectives.regression import OaplObjective
from megatron_rl.objectives.spec import (
    CONSTRAINTS,
    Constraint,
    KlPenalty,
    ObjectiveSpec,
    RolloutCorrection,
)

OBJECTIVE_NAMES = (*NAMED, "oapl")


def build_objective(name: str, **overrides: Any) -> PolicyObjective:
    """The named objective with some of its choices replaced.

    `overrides` are fields of ObjectiveSpec, as plain values from a configuration file.
    `constraint` is a mapping: with a `kind` ("ppo_clip", "hard_gate", "truncate", "tv_filter",
    "none") it is the whole new constraint, without one it replaces fields of the objective's
    own. `kl` and `rollout_correction` are mappings of their fields. Raises ValueError naming the
    nearest known word.
    """
    _check_known(name, OBJECTIVE_NAMES, "unknown objective")
    if name == "oapl":
        return OaplObjective(**_fields_of(OaplObjective, overrides, "objective 'oapl'"))
    spec = NAMED[name]
    values = _fields_of(ObjectiveSpec, overrides, f"objective {name!r}")
    if "constraint" in values:
        values["constraint"] = _build_constraint(values["constraint"], spec.constraint)
    for key, cls in (("kl", KlPenalty), ("rollout_correction", RolloutCorrection)):
        if isinstance(values.get(key), Mapping):
            values[key] = _build(cls, values[key], key)
    return Objective(dataclasses.replace(spec, **values))


def _build_constraint(value: Any, default: Constraint) -> Constraint:
    if isinstance(value, Constraint):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"constraint is {value!r}: give a mapping such as {{kind: hard_gate}}")
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind is None:
        known = _fields_of(type(default), fields, f"constraint {type(default).__name__}")
        return dataclasses.replace(default, **known)
    _check_known(str(kind), CONSTRAINTS, "unknown constraint kind")
    return _build(CONSTRAINTS[kind], fields, f"constraint {kind}")


def _build(cls: Any, value: Mapping[str, Any], where: str) -> Any:
    fields = _fields_of(cls, value, where)
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise ValueError(f"{where} needs {field.name!r}")
    return cls(**fields)


def _fields_of(cls: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values whose names are fields of `cls`, numbers in text read as numbers."""
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    for key in values:
        _check_known(key, types, f"{where} has no option")
    return {
        key: _read_number(value, f"{where}: {key}") if "float" in types[key] else value
        for key, value in values.items()
    }


def _read_number(value: Any, where: str) -> Any:
    """YAML 1.1 reads 7e-4, without a point, as text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{where} is {value!r}: it must be a number") from None


def _check_known(word: str, known: Iterable[str], problem: str) -> None:
    known = sorted(known)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{problem} {word!r}{hint} (known: {', '.join(known)})")
