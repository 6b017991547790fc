"""Tools of a real MCP server over standard input and output."""

import importlib.util

import pytest

from megatron_rl.environments.interface import BrokenEnvironmentError
from tests.running import assert_end
from tests.unit.environments import test_pool
from tests.unit.environments.test_pool import Talk
from tests.unit.environments.test_tools import call

HERE = "tests.unit.environments.mcp_tools"

if importlib.util.find_spec("mcp") is None or not importlib.util.find_spec("mcp.server.mcpserver"):
    pytest.skip("mcp 2 comes with vLLM, which is not installed", allow_module_level=True)


def open_pool(name, limit):
    return test_pool.open_pool(name, limit=limit, module=HERE)


def test_tools_of_server_are_called_and_its_errors_are_answers():
    scripts = [
        [call("add", a=3, b=4), call("double", x=4) + call("add", a=1, b=1), "8"],
        [call("add", a="three", b=4), call("fail", how="raise"), call("sub"),
         call("fail", how="die"), call("add", a=5, b=5), "7"],
    ]  # fmt: skip
    with open_pool("Remote", 60.0) as pool:
        pool.start()
        schemas = {one["function"]["name"]: one["function"] for one in pool.tools}
        assert list(schemas) == ["double", "add", "process", "fail"]
        assert schemas["add"]["description"] == "Add two numbers."
        assert schemas["add"]["parameters"]["required"] == ["a", "b"]
        answers = Talk(pool, row="{}")(scripts)
    contents = [[one["content"] for one in answer.observation] for (*most, _) in answers
                for answer in most]  # fmt: skip
    assert contents[:2] == [["7"], ["8", "2"]]
    assert all(text.startswith("error: ") for one in contents[2:6] for text in one)
    assert "integer" in contents[2][0] and contents[3] == ["error: Error executing tool fail"]
    assert contents[6] == ["10"]  # by a new server
    assert [one[-1].reward for one in answers] == [0.0, 1.0]


def test_server_that_hangs_ends_with_its_call_and_any_with_its_conversation():
    with open_pool("Remote", 3.0) as pool:
        scripts = [[call("process"), call("fail", how="hang"), call("process"), "7"]]
        ((first, late, second, last),) = Talk(pool, row="{}")(scripts)
    assert_end(int(one.observation[0]["content"]) for one in (first, second))
    assert first != second
    assert late.observation[0]["content"] == "error: timed out"
    assert last.reward == 1.0


def test_server_that_cannot_start_is_refused():
    with open_pool("Missing", 60.0) as pool, pytest.raises(BrokenEnvironmentError, match="no-such"):
        pool.start()
