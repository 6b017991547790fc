"""A real MCP server, a program: it imports nothing of ours, as servers of users."""

import os
import time

from mcp.server.mcpserver import MCPServer


def serve():
    """Serve over standard input and output."""
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
