"""Tools of a real MCP server over standard input and output."""

import importlib.util

import pytest

from megatron_rl.environments import tools
from megatron_rl.environments.interface import BrokenEnvironmentError
from megatron_rl.errors import UserError
from tests.running import assert_end
from tests.unit.environments import mcp_tools, test_pool
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


@pytest.mark.slow
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


def test_stray_bytes_are_ignored_and_results_of_any_kind_are_read():
    with open_pool("Noisy", 60.0) as pool:
        pool.start()
        names = [one["function"]["name"] for one in pool.tools]
        ((first, second, last),) = Talk(pool, row="{}")([[call("first"), call("second"), "7"]])
    assert names == ["double", "first", "second"]  # of both pages
    assert first.observation[0]["content"] == '{"price": 3}'
    assert second.observation[0]["content"] == "a page"
    assert last.reward == 1.0


@pytest.mark.slow
def test_result_without_measure_ends_its_own_call_only():
    """It is read until it is whole and then cut, or until the time of the call is over."""
    small = [call("double", x=4), call("double", x=5), "7"]
    scripts = [[call("first"), *small], [call("second"), *small], small]
    with open_pool("Huge", 5.0) as pool:
        pool.start()
        (parts, *rest), (line, *more), others = Talk(pool, row="{}")(scripts)
    (text,), (late,) = ([one["content"] for one in x.observation] for x in (parts, line))
    assert text == "error: timed out" or text.endswith("[cut: 1,999,999 characters]")
    assert late == "error: timed out"
    for first, second, last in (rest, more, others):
        assert [one.observation[0]["content"] for one in (first, second)] == ["8", "10"]
        assert last.reward == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [pytest.param("Dying", "Dying.server .*did not name its tools: MCPError",
                  marks=pytest.mark.slow),  # beside a server that cannot start
     ("Endless", "the list of tools has no end: page 'again' came again")],
)  # fmt: skip
def test_server_that_does_not_list_its_tools_is_refused(name, words):
    with open_pool(name, 60.0) as pool, pytest.raises(BrokenEnvironmentError, match=words):
        pool.start()


def test_server_that_hangs_at_start_is_ended(monkeypatch):
    monkeypatch.setattr(tools, "LIST_SECONDS", 2.0)
    with pytest.raises(UserError, match=r"Hanging.server .* did not name its tools in 2 s"):
        mcp_tools.Hanging.describe_tools()
