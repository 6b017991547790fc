"""Dataclasses whose fields are checked against their declared types."""

import math
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from megatron_rl.errors import UserError

# Numbers with their constraints.
Positive = Annotated[float, ">", 0]
NotNegative = Annotated[float, ">=", 0]


class Checked:
    """A base class for dataclasses that checks each field: a literal, a number or a component."""

    def __post_init__(self) -> None:
        for name, declared in get_type_hints(type(self), include_extras=True).items():
            check(name, getattr(self, name), declared)


def check(name: str, value: object, declared: Any) -> None:
    """Raise UserError unless the value of a field matches its declared type."""
    kinds = get_args(declared) if type(None) in get_args(declared) else (declared,)
    if value is None and type(None) in kinds:
        return
    kind = kinds[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise UserError(f"{name} is {value!r}: choose one of {choices}")
    elif kind is float or get_origin(kind) is Annotated:
        check_number(name, value, *getattr(kind, "__metadata__", (">=", -math.inf)))
    elif not isinstance(value, kinds):
        names = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
        raise UserError(f"{name} is {value!r}: it must be of type {names}")


def check_number(name: str, value: object, relation: str, minimum: float) -> None:
    """Raise UserError unless `value` is a finite number in the given relation to `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}: it must be a finite number")
    if value < minimum or (relation == ">" and value == minimum):
        raise UserError(f"{name} is {value}: it must be {relation} {minimum}")
