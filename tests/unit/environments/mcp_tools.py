"""A real MCP server, and the environment of its tools; started as a program, it serves."""

import os
import sys
import time

from megatron_rl.environments.tools import McpEnvironment


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


class Remote(McpEnvironment):
    server = (sys.executable, __file__)
    tools = (double,)

    def reward(self, text):
        return float(text == "7")


class Missing(McpEnvironment):
    server = ("no-such-server",)


def serve():
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def process() -> int:
        """Return the number of the server's process."""
        return os.getpid()

    @server.tool()
    def fail(how: str) -> str:
        """Do what a tool must not."""
        if how == "die":
            os._exit(3)
        if how == "hang":
            time.sleep(600)
        raise LookupError("nothing left")

    server.run("stdio")


if __name__ == "__main__":
    serve()
