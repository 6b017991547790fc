"""An unmodified environment of verifiers 0.1 in a virtual environment of its own.

MEGATRON_RL_VERIFIERS names its interpreter, for example after `python -m venv v` and
`v/bin/pip install verifiers==0.1.14`.
"""

import json
import os
from pathlib import Path

import pytest

from megatron_rl.environments.agent import AgentCommand
from megatron_rl.environments.interface import Answer
from megatron_rl.environments.pool import EnvironmentPool
from tests.unit.environments.test_pool import Talk

PYTHON = os.environ.get("MEGATRON_RL_VERIFIERS", "")


class Guess(AgentCommand):
    command = (PYTHON, str(Path(__file__).with_name("verifiers_agent.py")))


@pytest.mark.skipif(not PYTHON, reason="MEGATRON_RL_VERIFIERS names no Python with verifiers 0.1")
def test_environment_of_verifiers_is_answered_by_the_policy():
    row = json.dumps({"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"})
    with EnvironmentPool(
        f"{__name__}:Guess", workers=1, time_limit_seconds=300.0, on_error="zero",
        variables=["MEGATRON_RL_VERIFIERS"],
    ) as pool:  # fmt: skip
        answers = Talk(pool, row=row, patience=600)([["5", "7"], ["1", "2", "3", "4"]])
    again = Answer([{"role": "user", "content": "no"}])
    ended = {"done": True, "reason": "agent ended"}
    assert answers == [
        [again, Answer(reward=1.0, **ended)], [again] * 3 + [Answer(reward=0.0, **ended)]
    ]  # fmt: skip
