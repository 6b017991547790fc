"""Agents that know nothing of this package, as programs of another virtual environment."""

import os
from pathlib import Path

from megatron_rl.environments.agent import AgentCommand

HERE, PYTHON = Path(__file__).parent, os.environ.get("OUTSIDE_PYTHON", "")
LATER_PYTHON = os.environ.get("LATER_OUTSIDE_PYTHON", "")
OPENENV_PYTHON = os.environ.get("OPENENV_PYTHON", "")


class Client(AgentCommand):
    """OpenAI's client."""

    command = (PYTHON, str(HERE / "outside_client.py"))


class Verifiers(AgentCommand):
    """An environment of the library verifiers."""

    command = (PYTHON, str(HERE / "outside_verifiers.py"))


class Verifiers4(AgentCommand):
    """A task of the library verifiers 0.4, with its client for training."""

    command = (LATER_PYTHON, str(HERE / "outside_verifiers4.py"))


class OpenEnv(AgentCommand):
    """A server and a client of OpenEnv."""

    command = (OPENENV_PYTHON, str(HERE / "outside_openenv.py"))
