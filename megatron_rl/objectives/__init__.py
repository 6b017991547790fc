"""Policy objectives: weight, constraint, gradient and aggregation, and the named objectives.

Modules that need torch are imported on first use, so that a config can be checked without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rl.objectives.named import EXPERIMENTAL, NAMED, OBJECTIVE_NAMES, choose_objective
from megatron_rl.objectives.spec import ObjectiveSpec

if TYPE_CHECKING:
    from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
    from megatron_rl.objectives.objective import (
        OaplObjective,
        Objective,
        ObjectiveResult,
        PolicyObjective,
        build_objective,
    )
    from megatron_rl.objectives.padded import pnpo_loss, policy_loss
    from megatron_rl.objectives.statistics import Statistics

_COMPUTES = {
    "build_objective": "objective", "TokenClasses": "inputs", "TokenInputs": "inputs",
    "Objective": "objective", "OaplObjective": "objective", "ObjectiveResult": "objective",
    "PolicyObjective": "objective", "policy_loss": "padded", "pnpo_loss": "padded",
    "Statistics": "statistics",
}  # fmt: skip

__all__ = [
    "EXPERIMENTAL",
    "NAMED",
    "OBJECTIVE_NAMES",
    "Objective",
    "ObjectiveResult",
    "ObjectiveSpec",
    "OaplObjective",
    "PolicyObjective",
    "Statistics",
    "TokenClasses",
    "TokenInputs",
    "build_objective",
    "choose_objective",
    "pnpo_loss",
    "policy_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _COMPUTES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_COMPUTES[name]}"), name)
