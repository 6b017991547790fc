"""An MCP server by hand that does what servers must not; the argument says what."""

import json
import sys
import time


def tool(name):
    """The description of a tool without parameters."""
    return {"name": name, "description": name, "inputSchema": {"type": "object", "properties": {}}}


def answer(number, result):
    """Send the result of a request."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}) + "\n")
    sys.stdout.flush()


def list_tools(number, cursor, how):
    """Two pages of tools, or a page that never ends."""
    if how == "endless":
        answer(number, {"tools": [tool("first")], "nextCursor": "again"})
    elif cursor is None:
        answer(number, {"tools": [tool("first")], "nextCursor": "2"})
    else:
        answer(number, {"tools": [tool("second")]})


def answer_at_length(number, tool):
    """A million parts, or a line without an end."""
    if tool == "first":
        answer(number, {"content": [{"type": "text", "text": "x"}] * 1_000_000})
    while tool == "second":
        sys.stdout.write("x" * 65536)


def serve(how):
    """Answer requests line by line."""
    for line in sys.stdin:
        request = json.loads(line)
        number, method = request.get("id"), request["method"]
        if method == "initialize":
            if how == "hang":
                time.sleep(600)
            if how == "die":
                sys.exit(3)
            info = {"serverInfo": {"name": how, "version": "1"}, "capabilities": {"tools": {}}}
            version = request["params"]["protocolVersion"]
            answer(number, info | {"protocolVersion": version})
        elif method == "tools/list":
            list_tools(number, request.get("params", {}).get("cursor"), how)
        elif method == "tools/call":
            sys.stdout.buffer.write(b"no message\n{\n\xff\xfe\x00\n")
            sys.stdout.buffer.flush()
            if how == "huge":
                answer_at_length(number, request["params"]["name"])
            elif request["params"]["name"] == "first":
                answer(number, {"content": [], "structuredContent": {"price": 3}})
            else:
                part = {"type": "resource", "resource": {"uri": "file:///x", "text": "a page"}}
                answer(number, {"content": [part]})


if __name__ == "__main__":
    serve(sys.argv[1])
