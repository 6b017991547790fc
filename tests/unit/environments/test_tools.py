"""Tools: schemas as transformers makes them, calls as vLLM parses them, errors that are answers."""

import asyncio
import json

import pytest

from megatron_rl.environments.call_formats import (
    PARSERS,
    parse_calls,
    parse_hermes,
    parse_llama3_json,
)
from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    InfrastructureError,
    TurnTokens,
)
from megatron_rl.environments.tools import MAX_CALLS, Tool, ToolEnvironment
from megatron_rl.errors import UserError
from megatron_rl.messages import parse_message, with_text_arguments
from tests.unit.environments.shop import Graded, Shop, price, stock
from tests.unit.environments.test_pool import Talk, open_pool

ROW = {"prices": {"pear": 2.0}, "answer": "4"}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def step(message, environment=Shop):
    return asyncio.run(environment(ROW, 1).step(message))


def tool(name, content):
    return {"role": "tool", "name": name, "content": content}


def test_schemas_are_those_of_transformers():
    from transformers.utils import get_json_schema

    def without_row(item: str, count: int = 1): ...

    without_row.__name__, without_row.__doc__ = "price", price.__doc__
    # transformers' type in parentheses is part of its pattern for the argument's name
    without_row.__doc__ = without_row.__doc__.replace(" (int)", "")
    expected = get_json_schema(without_row)
    assert Tool(price).schema == expected
    assert Tool(price).schema["function"]["parameters"]["properties"]["item"] == {
        "type": "string",
        "description": "The name of the item, in lower case: as the customer wrote it.",
    }
    (ours, theirs) = (one["function"] for one in (Tool(stock).schema, get_json_schema(stock)))
    assert ours["description"] == theirs["description"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    properties = ours["parameters"]["properties"]
    assert properties["unit"] == theirs["parameters"]["properties"]["unit"]
    # JSON Schema's own form in place of OpenAPI's `nullable`
    assert properties["sizes"]["anyOf"] == [
        {"type": "array", "items": {"type": "integer"}}, {"type": "null"}
    ]  # fmt: skip


TEXTS = [
    "plain", "", "{", "}{", "so \\boxed{4}.", call("price", item="pear"),
    "I look. " + call("a") + call("b", x=[1]), "<tool_call></tool_call>",
    '<tool_call>{"name": "a", "arguments": {"x": {"y": "}"}}}', '{"name": "a", "parameters": {}}',
    '{"name": "a", "arguments": {"x": "{"}}; {"name": "b", "parameters": {"y": 2}}',
    'text {"name": "a", "parameters": {"é": "\\ud83d"}} more', "[1, {}]",
    "<tool_call>1</tool_call>",
]  # fmt: skip


KINDS = {
    "s": {"type": "string"}, "i": {"type": "integer"}, "f": {"type": "number"},
    "b": {"type": "boolean"}, "l": {"type": "array"}, "o": {"type": "object"},
    "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "e": {"enum": ["x", 3]},
}  # fmt: skip
TYPED = [{"type": "function", "function": {
    "name": "go", "parameters": {"type": "object", "properties": KINDS}}}]  # fmt: skip
VALUES = [
    {}, {"s": "5", "i": "5", "f": "2.0", "b": "True", "l": "[1]", "o": '{"x": 1}', "u": "null"},
    {"i": "x", "f": "nan", "b": "maybe", "l": "[", "u": "7", "e": "3"}, {"s": " a\nb ", "new": "7"},
    {"s": "<b>{</b>"},
]  # fmt: skip


def coder(values):
    return "<tool_call>\n<function=go>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()
    ) + "</function>\n</tool_call>"  # fmt: skip


def glm(values):
    return "<tool_call>go\n" + "".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for name, value in values.items()
    ) + "</tool_call>"  # fmt: skip


@pytest.mark.parametrize("name", list(PARSERS))
def test_calls_are_those_that_vllm_parses(name):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    class Tokenizer:  # vLLM's parsers read only the id of their special token
        def get_vocab(self):
            return {"<|python_tag|>": 1}

    write = {"qwen3_coder": coder, "glm45": glm}.get(name)
    texts = TEXTS if write is None else ["", "plain", "<tool_call>", *map(write, VALUES)]
    texts += [] if write is None else [f"I go. {write(VALUES[1])}\nand {write({})}, so"]
    tools = [ChatCompletionToolsParam(**one) for one in TYPED]
    for text in texts:
        parser = ToolParserManager.get_tool_parser(name)(Tokenizer(), tools)
        found = parser.extract_tool_calls(text, None)
        theirs = [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]
        ours = parse_calls(text, name, in_thinking=False, tools=TYPED)
        # What vLLM hands on as text because a call is wrong is an error that the policy reads.
        assert [(c.name, c.arguments) for c in ours if not c.problem] == theirs, text
        if name == "llama3_json":
            assert not any(c.problem for c in ours)


@pytest.mark.parametrize(
    "arguments",
    ["", ', "arguments": null', ', "arguments": ""', ', "arguments": "null"', ', "arguments": {}',
     ', "parameters": null', ', "parameters": {}', ', "arguments": " {} "'],
)  # fmt: skip
def test_call_without_arguments_is_a_call_with_none_however_it_is_written(arguments):
    written = '{"name": "now"' + arguments + "}"
    for text, name in ((f"<tool_call>{written}</tool_call>", "hermes"), (written, "llama3_json"),
                       (coder({}), "qwen3_coder"), (glm({}), "glm45")):  # fmt: skip
        (found,) = parse_calls(text, name, in_thinking=False)
        assert (found.arguments, found.problem) == ({}, "")
    message = {"role": "assistant", "tool_calls": [{"function": json.loads(written)}]}
    (message,) = with_text_arguments([parse_message(message)])
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_call_with_other_words_for_arguments_is_not_made_without_them():
    """vLLM's parsers read `arguments` and `parameters` alone."""
    for key in ("input", "args"):
        written = '{"name": "now", "' + key + '": {"zone": 3}}'
        (found,) = parse_calls(f"<tool_call>{written}</tool_call>", "hermes", in_thinking=False)
        assert found.problem == 'a call needs "name", a text, and "arguments", an object'
        assert parse_calls(written, "llama3_json", in_thinking=False) == []


def test_numbers_that_json_lacks_are_no_arguments():
    for value in ("NaN", "Infinity", "1e999"):
        (found,) = parse_hermes('<tool_call>{"name": "a", "arguments": {"x": [' + value + "]}}")
        assert "not valid JSON" in found.problem


def test_texts_of_a_call_have_the_types_of_the_tools_parameters():
    def weigh(sizes: list[int], names: dict[str, int] | None = None, exact: bool = False) -> str:
        """Weigh.

        Args:
            sizes: Sizes.
            names: Names.
            exact: Exactly.
        """
        return json.dumps([sizes, names, exact])

    class Scales(ToolEnvironment):
        tools, call_format = (weigh,), "glm45"

    text = "<tool_call>weigh<arg_key>sizes</arg_key><arg_value>[1, 2]</arg_value>"
    text += '<arg_key>names</arg_key><arg_value>{"a": 3}</arg_value></tool_call>'
    answer = asyncio.run(Scales({}, 0).step(text))
    assert answer.observation[0]["content"] == '[[1, 2], {"a": 3}, false]'


def test_wrong_calls_are_errors_in_one_format_and_text_in_other():
    assert [c.problem for c in parse_hermes("<tool_call>{'a'</tool_call>")] == [
        "the call is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"
    ]
    deep = "<tool_call>" + "[" * 100_000
    assert parse_hermes(deep)[0].problem in (
        "the call is nested too deep", "the call is not valid JSON: Expecting value: line 1 column "
        "100001 (char 100000)")  # fmt: skip
    assert parse_llama3_json("so \\boxed{4}") == []
    assert parse_llama3_json('{"a":' * 100_000) == []


def test_call_that_text_with_braces_follows_is_made():
    """vLLM's parser finds none: the model would wait for a result that never comes."""
    (found,) = parse_llama3_json('{"name": "a", "parameters": {}} and so \\boxed{7}')
    assert (found.name, found.arguments) == ("a", {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"<think>I could {call('a')}</think>\nThe answer is 7.", []),
        (f"I could {call('a')} or </think>{call('b')}", ["b"]),  # the prompt opened thinking
        (f"<think>x</think>{call('a')}<think>y {call('b')}</think>{call('c')}", ["a", "c"]),
        (f"{call('a')}<think>y {call('b')}", ["a"]),
    ],
)
def test_calls_inside_thinking_are_no_calls(text, names):
    assert [one.name for one in parse_hermes(text)] == names
    written = text.replace("<tool_call>", "").replace("</tool_call>", "")
    assert [one.name for one in parse_llama3_json(written)] == names


@pytest.mark.parametrize("mark", ["</think>", "<think>", "<tool_call>", "{", "<think></think>"])
@pytest.mark.parametrize("parse", PARSERS.values())
def test_parsing_takes_one_pass_over_marks_that_a_model_repeats(parse, mark):
    """A megabyte: two nested passes would take hours, and the limit of a test ends them."""
    assert not any(call.name for call in parse(mark * 150_000))


def test_call_in_thinking_that_prompt_opened_and_turn_does_not_end_is_no_call():
    asked = call("price", item="pear", count=2)
    for in_thinking, turn, is_made in (
        (True, f"I could {asked}", False),
        (True, f"so</think>{asked}", True),
        (False, f"I look: {asked}", True),
    ):
        environment = Shop(ROW, 1)
        environment.receive_tokens(TurnTokens([5], [6], [0.0], True, in_thinking=in_thinking))
        assert asyncio.run(environment.step(turn)).done is not is_made


def test_tool_call_is_executed_and_final_turn_is_graded():
    assert step(call("price", item="pear", count=2)) == Answer([tool("price", "4.0")])
    assert step(call("stock", item="x", sizes=[1])).observation == [
        tool("stock", '{"item": "x", "unit": "piece", "sizes": [1]}')
    ]
    assert step("It is 4") == Answer(reward=1.0, done=True, reason="answered")
    assert step("It is 5") == Answer(reward=0.0, done=True, reason="answered")
    assert step("4", Graded) == Answer(reward=None, done=True, reason="answered")
    llama = '{"name": "price", "parameters": {"item": "pear"}}'
    assert step(llama, Graded) == Answer([tool("price", "2.0")])
    both = call("price", item="pear") + call("price", item="pear", count=3)
    assert [one["content"] for one in step(both).observation] == ["2.0", "6.0"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (call("cost", item="pear"), "error: no tool is named cost; there are: price, stock, order"),
        (call("price"), "error: item: Field required"),
        (
            call("price", item="pear", count="two"),
            "error: count: Input should be a valid integer, unable to parse string as an integer",
        ),
        (call("price", item="pear", row={}), "error: row: Extra inputs are not permitted"),
        (call("price", item="kiwi"), "error: KeyError: 'kiwi'"),
        (call("stock", item="x", unit="kg"), "error: unit: Input should be 'piece' or 'box'"),
        ('<tool_call>{"name": 1}', 'error: a call needs "name", a text, and "arguments", an'),
    ],
)
def test_policy_receives_errors_of_tool_call(message, error):
    (answer,) = step(message).observation
    assert answer["role"] == "tool"
    assert answer["content"].startswith(error)


def test_many_calls_and_long_results_are_cut():
    contents = [one["content"] for one in step(call("price", item="pear") * 40).observation]
    assert contents == ["2.0"] * MAX_CALLS + [f"error: more than {MAX_CALLS} calls"]
    (answer,) = step(call("order", what="long")).observation
    assert answer["content"] == "z" * 8000 + " [cut: 10,000,000 characters]"


def test_infrastructure_failure_is_lost_conversation():
    with pytest.raises(InfrastructureError):
        step(call("order", what="lose"))


def test_conversation_continues_after_hung_tool_in_pool():
    hang = [call("order", what="hang"), call("order", what="pears"), "4"]
    die = [call("order", what="die")]
    with open_pool("Shop", limit=1.0, module="tests.unit.environments.shop") as pool:
        pool.start()
        assert [one["function"]["name"] for one in pool.tools] == ["price", "stock", "order"]
        row = json.dumps(ROW)
        answers = Talk(pool, row=row)([hang, die, [call("price", item="pear"), "4"]])
    assert answers[0] == [
        Answer([tool("order", "error: timed out")]),
        Answer([tool("order", "ordered pears ?")]),
        Answer(reward=1.0, done=True, reason="answered"),
    ]
    assert answers[1][0].kind == "failed"
    assert answers[2][0] == Answer([tool("price", "2.0")])
    assert answers[2][1].reward == 1.0


def no_type(x):
    """Do it.

    Args:
        x: A number.
    """


def no_docstring(x: int): ...


def no_description(x: int):
    """Do it."""


def by_position(x: int, /):
    """Do it.

    Args:
        x: A number.
    """


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_type, "tool no_type: parameter x has no type; annotate it, as x: int"),
        (no_docstring, "tool no_docstring has no docstring; the policy reads it"),
        (no_description, "its docstring does not describe x; add a line `x: description`"),
        (by_position, "parameter x: int cannot be passed by name"),
    ],
)
def test_tool_unsupported_by_template_is_refused(function, words):
    class Environment(ToolEnvironment):
        tools = (function,)

    with pytest.raises(UserError, match=words):
        Environment.describe_tools()


def test_unusable_environment_is_refused_before_first_conversation():
    with (
        open_pool("Undescribed", module="tests.unit.environments.shop") as pool,
        pytest.raises(BrokenEnvironmentError, match="does not describe x"),
    ):
        pool.start()
