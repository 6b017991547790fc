"""Chat messages and tools in the formats of published data sets, and what is refused of them."""

import json

import pytest

from megatron_rl.messages import parse_messages, parse_tools, with_text_arguments

USER = {"role": "user", "content": "Weather in Paris?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris"}},
}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "18"}
WHOLE = (USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL)


def calling(arguments, **message):
    """The same conversation with other arguments of its call."""
    function = {"name": "weather", "arguments": arguments}
    return [USER, {"role": "assistant", "tool_calls": [CALL | {"function": function}]} | message,
            TOOL]  # fmt: skip


def calling_by(keys):
    """The same conversation, with other keys next to the name of its call."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather"} | keys}
    return [USER, {"role": "assistant", "tool_calls": [call]}, TOOL]


@pytest.mark.parametrize(
    "value",
    [
        calling({"city": "Paris"}, content=None),
        calling({"city": "Paris"}),  # without content
        calling('{"city": "Paris"}'),  # OpenAI's API
        [USER, {"role": "assistant", "tool_calls": json.dumps([CALL])}, TOOL],
        [USER, {"role": "assistant", "tool_calls": [json.dumps(CALL)]}, TOOL],  # `datasets.Json`
        json.dumps(WHOLE),
        [json.dumps(one) for one in WHOLE],
        [USER | {"content": [{"type": "text", "text": "Weather "},
                             {"type": "text", "text": "in Paris?"}]}, *WHOLE[1:]],
        [one | {"name": None} for one in WHOLE],
        calling_by({"parameters": {"city": "Paris"}}),  # Llama
        calling_by({"args": {"city": "Paris"}}),  # LangChain
        calling_by({"input": {"city": "Paris"}, "arguments": None}),  # Anthropic
        [USER | {"tool_calls": ""}, *WHOLE[1:]],
    ],
)  # fmt: skip
def test_openai_and_trl_formats_are_read_alike(value):
    assert parse_messages(value, key="prompt") == WHOLE


def test_calls_without_wrapping_or_arguments():
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    for written in ({"name": "now"}, {"name": "now", "arguments": None},
                    {"function": {"name": "now", "arguments": ""}}):  # fmt: skip
        _, message, _ = parse_messages(
            [USER, {"role": "assistant", "tool_calls": [written]}, TOOL], key="prompt"
        )
        assert message["tool_calls"] == [call]
    _, message, result = parse_messages(  # OpenAI's form before tool_calls
        [USER, {"role": "assistant", "function_call": {"name": "now", "arguments": "{}"}},
         {"role": "function", "name": "now", "content": "noon"}], key="prompt",
    )  # fmt: skip
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result == {"role": "tool", "content": "noon", "name": "now"}


def test_nulls_of_other_rows_are_dropped_from_tables_only():
    arguments = {"city": "Paris", "day": None, "place": {"zip": None}, "days": [None, 1]}
    of_table = parse_messages(calling(arguments), key="prompt", from_table=True)
    assert of_table[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Paris", "place": {}, "days": [None, 1],
    }  # fmt: skip
    as_text = parse_messages(calling(json.dumps(arguments)), key="prompt", from_table=True)
    as_lines = parse_messages(calling(arguments), key="prompt")
    for messages in (as_text, as_lines):  # written by the author
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_sharegpt_is_read_as_openai():
    value = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "Weather in Paris?", "weight": None},
        {
            "from": "function_call",
            "value": json.dumps({"name": "weather", "arguments": {"city": "Paris"}}),
        },
        {"from": "observation", "value": "18"},
        {"from": "gpt", "value": "It is 18."},
        {"from": "human", "value": "And Rome?"},
    ]
    messages = parse_messages(value, key="conversations")
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert messages[2]["tool_calls"][0]["function"] == CALL["function"]
    assert messages[5] == {"role": "user", "content": "And Rome?"}


def test_results_follow_the_order_of_their_calls():
    """Results name their calls by ids, which templates leave out; they may arrive in any order."""
    calls = [CALL | {"id": one} for one in "abc"]
    results = [{"role": "tool", "tool_call_id": one, "content": one} for one in "cab"]
    value = [USER, {"role": "assistant", "tool_calls": calls}, *results, USER]
    found = parse_messages(value, key="prompt")
    assert [one["content"] for one in found[2:]] == ["a", "b", "c", USER["content"]]
    for other in ("x", "a", None):  # of no call, or of one call twice
        results[0]["tool_call_id"] = other
        found = parse_messages(value, key="prompt")
        assert [one["content"] for one in found[2:5]] == ["c", "a", "b"]


def test_sequence_of_structs_is_a_list_of_messages():
    """As `datasets` before release 4 stores them."""
    value = {"role": ["system", "user"], "content": ["Be short.", "a"], "name": None}
    assert [one["role"] for one in parse_messages(value, key="prompt")] == ["system", "user"]
    value = {"from": ["human"], "value": ["a"]}
    assert parse_messages(value, key="prompt") == ({"role": "user", "content": "a"},)
    with pytest.raises(ValueError, match="must be a text or a list of chat messages"):
        parse_messages({"role": ["user"], "content": ["a", "b"]}, key="prompt")


@pytest.mark.parametrize(
    "question",
    [
        '[{"value": 1}, {"value": 2}] is a list. Add the values.',
        '[{"from": "A", "to": "B"}]: is it a cycle?',
        '{"role": "user", "content": 1} is what?',
    ],
)
def test_question_that_is_no_list_of_messages_stays_a_text(question):
    assert parse_messages(question, key="prompt") == ({"role": "user", "content": question},)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('[{"role": "user", "content": "a"}] Go on.', r"looks like a list of chat messages, but"),
        ([*WHOLE, {"role": "assistant", "content": "18"}], "prompt ends with a message of the"),
        ([{"role": "human", "content": "a"}], r"message 1: .* a role of system, .* role='human'"),
        ([{"from": "narrator", "value": "a"}], r"from must be one of .*, got 'narrator'"),
        ([USER | {"content": None}], "message 1: a chat message must have a text as content"),
        ([USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         "content has a part of type image_url"),
        ([USER | {"images": ["a.png"]}], "has the key images; models here read text only"),
        (calling('{"city": '), r"message 2: .*is not JSON"),
        (calling("[1]"), r"arguments of weather must be an object or its JSON text, got '\[1\]'"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}, TOOL], "a function with"),
        ([{"role": "system", "content": ""}], "prompt has messages without any text"),
        ({"role": "user", "content": "a"}, "prompt must be a text or a list of chat messages"),
        (["a"], "message 1: a chat message must have a role and content, got 'a'"),
        (calling({}, function_call={"name": "a", "arguments": "{}"}), "has tool_calls and func"),
        (calling_by({"arguments": {"city": "a"}, "input": {"city": "b"}}), "has input next to arg"),
        (calling_by({"arguments": {}, "thought": "it rains"}), "the call of weather has thought n"),
    ],
)  # fmt: skip
def test_other_messages_are_refused(value, error):
    with pytest.raises(ValueError, match=error):
        parse_messages(value, key="prompt")


def test_tools_are_openai_s_schemas():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "parameters": parameters}
    whole = ({"type": "function", "function": function},)
    for value in (
        list(whole), json.dumps(whole), [json.dumps(whole[0])], [function],
        [{"type": "function"} | function],  # OpenAI's Responses
    ):  # fmt: skip
        assert parse_tools(value) == whole
    assert parse_tools([{"name": "weather", "strict": None}], from_table=True) == (
        {"type": "function", "function": {"name": "weather"}},
    )
    for key in ("input_schema", "inputSchema"):  # Anthropic, MCP
        assert parse_tools([{"name": "weather", key: parameters}]) == whole
    for nothing in (None, "", " ", [], "[]", "null"):
        assert parse_tools(nothing) == ()
    for value, error in (
        (["weather"], r"functions must have .* for each tool, got 'weather'"),
        ("{}", "functions must be a list of tools or its JSON text"),
        ([{"description": "a"}], r'functions must have \{"type": "function", "function"'),
    ):
        with pytest.raises(ValueError, match=error):
            parse_tools(value, key="functions")


def test_calls_with_text_arguments_for_templates_that_concatenate_them():
    user, message, tool = with_text_arguments(WHOLE)
    assert (user, tool) == (USER, TOOL)
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert WHOLE[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
