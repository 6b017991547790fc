"""Memory by formula beside rehearsals of the real actor; tools/compare_plan.py has hundreds."""

import pytest

from megatron_rl.planning.parts import Parts
from tools.compare_plan import compare, shape_of, write_model

DENSE, EXPERTS = "Qwen3-8B", "Qwen3-30B-A3B"


@pytest.mark.parametrize(
    "name,parts",
    [
        (DENSE, Parts(tensor=2, context=2, data=2, tokens=16384)),
        (DENSE, Parts(pipeline=2, context=2, data=2, recompute="full", tokens=16384)),
        (EXPERTS, Parts(tensor=2, context=2, data=1, expert=2, tokens=16384)),
    ],
    ids=["tensor and context", "pipeline, recomputed", "experts"],
)
def test_memory_is_that_of_a_rehearsal(name, parts, tmp_path):
    row = compare(name, parts, write_model(shape_of(name), tmp_path / "model"))
    assert abs(row["states_error"]) < 0.001
    assert abs(row["error"]) < 0.05
