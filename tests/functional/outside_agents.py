"""Agents that know nothing of this package, as programs of another virtual environment."""

import os
from pathlib import Path

from megatron_rl.environments.agent import AgentCommand

HERE, PYTHON = Path(__file__).parent, os.environ.get("OUTSIDE_PYTHON", "")


class Client(AgentCommand):
    """OpenAI's client."""

    command = (PYTHON, str(HERE / "outside_client.py"))


class Verifiers(AgentCommand):
    """An environment of the library verifiers."""

    command = (PYTHON, str(HERE / "outside_verifiers.py"))
