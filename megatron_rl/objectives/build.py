"""From a name and overrides, as they stand in a configuration, to an objective."""

from typing import Any

from megatron_rl.objectives.choice import choose_objective
from megatron_rl.objectives.objective import OaplObjective, Objective, PolicyObjective
from megatron_rl.objectives.spec import ObjectiveSpec


def build_objective(name: str, **overrides: Any) -> PolicyObjective:
    """The named objective with some of its choices replaced.

    `overrides` are fields of ObjectiveSpec, as plain values from a configuration file, as
    `choose_objective` takes them. Raises ValueError naming the nearest known word.
    """
    choice = choose_objective(name, overrides)
    return Objective(choice) if isinstance(choice, ObjectiveSpec) else OaplObjective(choice.beta)
