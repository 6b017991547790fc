"""Build an objective from the name and overrides of a config."""

from typing import Any

from megatron_rl.objectives.choice import choose_objective
from megatron_rl.objectives.function import FunctionObjective
from megatron_rl.objectives.function_spec import FunctionSpec
from megatron_rl.objectives.objective import OaplObjective, Objective, PolicyObjective
from megatron_rl.objectives.spec import ObjectiveSpec


def build_objective(name: str, **overrides: Any) -> PolicyObjective:
    """Build the named objective with some of its fields replaced.

    `overrides` are fields of ObjectiveSpec as plain values, as in a config (see
    `choose_objective`). Raises ValueError with the nearest known name.
    """
    choice = choose_objective(name, overrides)
    if isinstance(choice, FunctionSpec):
        return FunctionObjective.load(choice)
    return Objective(choice) if isinstance(choice, ObjectiveSpec) else OaplObjective(choice.beta)
