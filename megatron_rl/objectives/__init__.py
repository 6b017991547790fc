"""Policy objectives: weight, constraint, score and aggregation, and the named choices."""

from megatron_rl.objectives.build import build_objective
from megatron_rl.objectives.objective import Objective, ObjectiveResult
from megatron_rl.objectives.spec import ObjectiveSpec
from megatron_rl.objectives.statistics import Statistics

__all__ = ["Objective", "ObjectiveResult", "ObjectiveSpec", "Statistics", "build_objective"]
