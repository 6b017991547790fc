"""The environment of a real MCP server's tools."""

import sys
from pathlib import Path

from megatron_rl.environments.tools import McpEnvironment


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


class Remote(McpEnvironment):
    server = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
    tools = (double,)

    def reward(self, text):
        return float(text == "7")


class Missing(McpEnvironment):
    server = ("no-such-server",)


def _misbehaving(how):
    return (sys.executable, str(Path(__file__).with_name("mcp_misbehaving.py")), how)


class Noisy(Remote):
    server = _misbehaving("noisy")


class Huge(Remote):
    server = _misbehaving("huge")


class Endless(Remote):
    server = _misbehaving("endless")


class Dying(Remote):
    server = _misbehaving("die")


class Hanging(Remote):
    server = _misbehaving("hang")
