"""Turn the name and overrides of a config into a specification; needs no torch."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from megatron_rl.errors import UserError
from megatron_rl.objectives.experimental import EXPERIMENTAL
from megatron_rl.objectives.function_spec import FUNCTION, FunctionSpec
from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.spec import CONSTRAINTS, OaplSpec, ObjectiveSpec

Spec = ObjectiveSpec | OaplSpec | FunctionSpec
OBJECTIVES: dict[str, ObjectiveSpec | OaplSpec] = {**NAMED, **EXPERIMENTAL}
OBJECTIVE_NAMES = tuple(OBJECTIVES)


def choose_objective(name: str, overrides: Mapping[str, Any]) -> Spec:
    """Return the named specification with some of its fields replaced by plain values.

    `constraint` is a mapping: with a `kind` (a key of `CONSTRAINTS`) it is a complete constraint,
    without one it replaces fields of the objective's own. `kl` and `rollout_correction` are
    mappings of their fields. The name `function` needs the override `function`, a loss of the
    user's own. Raises ValueError with the nearest known name.
    """
    if name == FUNCTION or "function" in overrides:
        return _choose_function(name, overrides)
    _check_known(name, OBJECTIVES, "objective.name: unknown objective")
    default, where = OBJECTIVES[name], f"objective {name!r}"
    for key in overrides:
        _check_known(key, [*get_type_hints(type(default)), "name"], f"{where} has no option")
    choice: ObjectiveSpec | OaplSpec = _replace(default, overrides, where)
    return choice


def _choose_function(name: str, overrides: Mapping[str, Any]) -> FunctionSpec:
    options = [field.name for field in dataclasses.fields(FunctionSpec)]
    if name != FUNCTION:
        raise UserError(
            f"objective.name={name} and objective.function={overrides['function']} are both set; "
            "unset one"
        )
    if unknown := [key for key in overrides if key not in options]:
        raise UserError(
            f"objective.{unknown[0]} cannot be combined with objective.function, which takes only "
            f"{' and '.join(options[1:])}; compute it in the function, or unset it"
        )
    spec: FunctionSpec = _replace(FunctionSpec, overrides, "objective.function")
    return spec


def _replace(default: Any, values: Mapping[str, Any], where: str) -> Any:
    """Replace fields of a dataclass, or create an instance if `default` is a class."""
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
                raise UserError(f"{where} needs {field.name!r}")
    try:
        return cls(**read) if cls is default else dataclasses.replace(default, **read)
    except ValueError as wrong:
        raise UserError(f"{where}: {wrong}") from None


def _read(value: Any, declared: Any, current: Any, where: str, key: str) -> Any:
    """Convert a plain value to a field's declared type; the dataclass checks the value itself."""
    types = get_args(declared) or (declared,)
    classes = [cls for cls in types if dataclasses.is_dataclass(cls)]
    if classes and not (value is None and type(None) in types):
        inner = f"objective.{key}"
        if len(classes) > 1:
            return _read_kind(value, current, inner)
        return _replace(classes[0], _require_mapping(value, classes[0], inner), inner)
    if isinstance(value, str) and float in types:  # YAML 1.1 reads 7e-4, without a point, as text
        try:
            return float(value)
        except ValueError:
            raise UserError(f"{where}: {key} is {value!r}: it must be a number") from None
    return value


def _read_kind(value: Any, current: Any, where: str) -> Any:
    """Build the constraint of the given kind, or replace fields of the current one."""
    if isinstance(value, str):
        value = {"kind": value}
    kinds = f"; or give a new one as {{kind: ...}} of {', '.join(CONSTRAINTS)}"
    fields = dict(_require_mapping(value, current, where, kinds))
    kind = fields.pop("kind", None)
    if kind is None:
        return _replace(current, fields, where)
    _check_known(str(kind), CONSTRAINTS, f"{where}.kind: unknown kind")
    return _replace(CONSTRAINTS[kind], fields, f"{where} {kind}")


def _require_mapping(value: Any, wanted: Any, where: str, further: str = "") -> Mapping[str, Any]:
    """Return the value if it is a mapping; otherwise raise UserError with the keys and an example.

    wanted: the dataclass that the mapping describes, or an instance with example values.
    """
    if isinstance(value, Mapping):
        return value
    every = {field.name: getattr(wanted, field.name, 0.1) for field in dataclasses.fields(wanted)}
    example = ", ".join(f"{k}: {v}" for k, v in list(every.items())[:2] if v is not None)
    keys = f"give its keys ({', '.join(every)}), as {{{example}}}" if every else "it has no keys"
    raise UserError(f"{where} is {value!r}: {keys}{further}")


def _check_known(word: str, known: Iterable[str], problem: str) -> None:
    known = sorted(known)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{problem} {word!r}{hint} (known: {', '.join(known)})")
