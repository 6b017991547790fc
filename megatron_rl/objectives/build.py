"""From a name and overrides, as they stand in a configuration, to an objective."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.objective import Objective
from megatron_rl.objectives.spec import CONSTRAINTS, Constraint, ObjectiveSpec


def build_objective(name: str, **overrides: Any) -> Objective:
    """The named objective with some of its choices replaced.

    `overrides` are fields of ObjectiveSpec. `constraint` is a mapping: with a `kind`
    ("ppo_clip", "hard_gate", "truncate", "none") it is the whole new constraint, without one it
    replaces fields of the objective's own. Raises ValueError naming the nearest known word.
    """
    if name not in NAMED:
        raise ValueError(f"unknown objective {name!r}{_nearest(name, NAMED)}")
    spec = NAMED[name]
    known = [field.name for field in dataclasses.fields(ObjectiveSpec)]
    for key in overrides:
        if key not in known:
            raise ValueError(f"objective {name!r} has no option {key!r}{_nearest(key, known)}")
    if "constraint" in overrides:
        overrides["constraint"] = _build_constraint(overrides["constraint"], spec.constraint)
    return Objective(dataclasses.replace(spec, **overrides))


def _build_constraint(value: Any, default: Constraint) -> Constraint:
    if isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"constraint is {value!r}: give a mapping such as {{kind: hard_gate}}")
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind is not None and kind not in CONSTRAINTS:
        raise ValueError(f"unknown constraint kind {kind!r}{_nearest(str(kind), CONSTRAINTS)}")
    cls = type(default) if kind is None else CONSTRAINTS[kind]
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            raise ValueError(
                f"constraint {cls.__name__} has no option {key!r}{_nearest(key, known)}"
            )
    try:
        return dataclasses.replace(default, **fields) if kind is None else cls(**fields)
    except TypeError as missing:  # a required bound was not given
        raise ValueError(f"constraint {cls.__name__}: {missing}") from missing


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(sorted(known))})"
