"""Policy objectives: weight, constraint, gradient and aggregation, and the named choices."""

from megatron_rl.objectives.build import OBJECTIVE_NAMES, build_objective
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.objective import (
    OaplObjective,
    Objective,
    ObjectiveResult,
    PolicyObjective,
)
from megatron_rl.objectives.padded import policy_loss
from megatron_rl.objectives.pnpo import pnpo_loss
from megatron_rl.objectives.spec import ObjectiveSpec
from megatron_rl.objectives.statistics import Statistics

__all__ = [
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
    "pnpo_loss",
    "policy_loss",
]
