"""Conversations of several turns: what answers the policy, in worker processes; needs no torch."""

from megatron_rl.environments.agent import AgentCommand, AgentEnvironment
from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    Environment,
    EnvironmentFailure,
    InfrastructureError,
)
from megatron_rl.environments.tools import McpEnvironment, ToolEnvironment

__all__ = [
    "AgentCommand",
    "AgentEnvironment",
    "Answer",
    "BrokenEnvironmentError",
    "Environment",
    "EnvironmentFailure",
    "InfrastructureError",
    "McpEnvironment",
    "ToolEnvironment",
]
