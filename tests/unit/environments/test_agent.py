"""Agents that call the policy by OpenAI's protocol: unmodified clients, fixed histories."""

import asyncio
import importlib.util
import json
import time

import pytest

from megatron_rl.environments.endpoint import Endpoint, RewrittenHistoryError, Session
from megatron_rl.environments.interface import Answer, TurnTokens
from tests.unit.environments.agents import QUESTION
from tests.unit.environments.test_pool import Talk, open_pool

HERE = "tests.unit.environments.agents"
ENDED = {"done": True, "reason": "agent ended"}

if importlib.util.find_spec("openai") is None:
    pytest.skip("OpenAI's client comes with vLLM, which is not installed", allow_module_level=True)


def talk(name, scripts, **row):
    with open_pool(name, module=HERE, limit=60.0) as pool:
        return converse(pool, scripts, **row)


def converse(pool, scripts, **row):
    return Talk(pool, row=json.dumps({"prompt": QUESTION, **row}), patience=120.0)(scripts)


@pytest.fixture(scope="module")
def pool():
    """Run whichever agent of this module a row names."""
    with open_pool("Any", module=HERE, limit=60.0) as pool:
        yield pool


def user(text):
    return Answer([{"role": "user", "content": text}])


def test_unmodified_client_receives_turns_of_policy(pool):
    scripts = [["50", "20", "30"], ["30"], ["1", "2", "3", "4", "5"]]
    answers = converse(pool, scripts, agent="Guesser", secret=30)
    assert answers[0] == [user("lower"), user("higher"), Answer(reward=1.0, **ENDED)]
    assert answers[1] == [Answer(reward=1.0, **ENDED)]
    assert answers[2] == [user("higher")] * 4 + [Answer(reward=0.0, **ENDED)]


def test_tool_calls_follow_format_of_model(pool):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    answers = converse(pool, [[f"I look. {call}{call}", "blue"], ["red"]], agent="Looker")
    first, second = answers[0]
    assert [one["content"] for one in first.observation] == ['look: {"at": "\\u00e9"}'] * 2
    assert [one["tool_call_id"] for one in first.observation] == ["call_0_0", "call_0_1"]
    assert second == Answer(reward=1.0, **ENDED)
    assert answers[1] == [Answer(reward=0.0, **ENDED)]


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("Rewriter", {"a turn": "turn 1: RewrittenHistoryError: message 3 of the request is not "
                                "that of the conversation, whose first 3 messages are fixed"}),
        ("Silent", {"a": "turn 1: the agent ended without a request to the model"}),
        ("Ending", {"raise": "turn 1: LookupError: my own mistake",
                    "a": "the agent returned None; return the reward, a finite number"}),
        ("BrokenProgram", {"a": "ended with status 1 and the last line '' no such model; print"}),
    ],
)  # fmt: skip
def test_agent_error_is_one_line(pool, name, errors):
    scripts = [[turn] for turn in errors]
    is_program = name == "BrokenProgram"
    found = talk(name, scripts) if is_program else converse(pool, scripts, agent=name)
    for (failure,), words in zip(found, errors.values(), strict=True):
        assert failure.kind == ("rewritten" if "RewrittenHistory" in failure.text else "failed")
        assert words in failure.text
        assert "\n" not in failure.text


def test_changed_history_restarts_as_often_as_it_may():
    """The whole new history is the answer; one more change is a failure."""
    with open_pool("Any", module=HERE, limit=60.0, max_rewrites=1) as pool:
        answers, twice = (
            converse(pool, [["a turn", "x"]], agent=name) for name in ("Rewriter", "TwiceRewriter")
        )
    summary = {"role": "assistant", "content": "a "}
    messages = [*QUESTION, summary, {"role": "user", "content": "Go on."}]
    ended = Answer(reward=1.0, **ENDED)
    assert answers == [[Answer(messages, restarts=True), ended]]
    *_, failure = twice[0]
    assert failure.kind == "rewritten" and "environment.max_rewrites" in failure.text


def test_changed_token_ids_restart():
    async def check():
        session = Session(QUESTION, call_format="hermes", max_rewrites=1)
        session.receive(TurnTokens([5, 6], [7, 2], [-0.5, -0.25], is_complete=True))
        asked = asyncio.create_task(session.generate({"token_ids": [5, 6]}))
        await session.next_request()
        session.answer("x")
        await asked
        asked = asyncio.create_task(session.generate({"token_ids": [9, 8]}))
        assert await session.next_request() == Answer(token_ids=[9, 8], restarts=True)
        session.receive(TurnTokens([9, 8], [3], [-1.0], is_complete=True, restarts=True))
        session.answer("y")
        assert (await asked)[1]["usage"]["prompt_tokens"] == 2
        assert (await session.generate({"token_ids": [9, 8, 4]}))[0] == 409

    asyncio.run(check())


def test_missing_prompt_of_row_is_named():
    with open_pool("Silent", module=HERE) as pool:
        ((failure,),) = Talk(pool, row='{"question": "x"}')([["a"]])
    assert (
        "the row has no column 'prompt' (its columns: question); set Silent.prompt" in failure.text
    )


def appears(file):
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.exists()


def test_agent_ends_with_its_conversation(tmp_path, pool):
    mark, started = tmp_path / "mark", tmp_path / "started"
    row = {"prompt": QUESTION, "agent": "Waiting", "mark": str(mark), "started": str(started)}
    pool.begin(0, json.dumps(row), 0)
    pool.send(0, "a turn")
    assert appears(started)  # it has its turn, and makes no further request
    pool.end(0)
    assert appears(mark)
    # Also one that has not begun; the process goes on, and answers others.
    row = {"prompt": QUESTION, "agent": "Guesser", "secret": 30}
    for place in range(3):
        pool.begin(place, json.dumps(row), 0)
        pool.send(place, "30")
        pool.end(place)
    assert Talk(pool, row=json.dumps(row))([["30"]]) == [[Answer(reward=1.0, **ENDED)]]


def test_program_is_agent_also_if_it_leaves_another_one():
    """That one keeps the streams open, and ends with the conversation."""
    answers = talk("LeavingProgram", [["50", "20", "30"]], secret=30)
    assert answers == [[user("lower"), user("higher"), Answer(reward=1.0, **ENDED)]]


def serve(requests, **settings):
    """Run `requests(session, url, client)` against a server of one conversation."""
    import httpx

    async def run():
        session = Session(QUESTION, call_format="hermes", **settings)
        endpoint = await Endpoint(session).start()
        async with httpx.AsyncClient(timeout=30) as client:
            result = await asyncio.wait_for(requests(session, endpoint.url, client), 60)
        endpoint.close()
        return result

    return asyncio.run(run())


ASKED = {"messages": QUESTION}


def test_only_its_own_address_reaches_conversation():
    """The path has a random token, and the server listens on the loopback interface alone."""

    async def requests(session, url, client):
        assert url.startswith("http://127.0.0.1:") and len(url.split("/")[3]) >= 20
        base = url.rsplit("/", 2)[0]

        async def post(url, body):
            return (await client.post(f"{url}/chat/completions", json=body)).status_code

        statuses = [await post(f"{base}/guess/v1", ASKED), await post(url, {}),
                    (await client.get(f"{url}/models")).status_code]  # fmt: skip
        waiting = asyncio.create_task(post(url, ASKED))
        await session.next_request()
        statuses.append(await post(url, ASKED | {"model": "other"}))  # a second one at once
        session.close()
        return [*statuses, await waiting, await post(url, ASKED)]

    assert serve(requests) == [404, 400, 404, 409, 410, 410]


BAD_MESSAGES = {
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "calls": [{"role": "assistant", "content": "", "tool_calls": ["x"]}],
    "number": [{"role": "assistant", "tool_calls": 5}],
    "arguments": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
    ],
    "name": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}],
    "nested": [{"role": "user", "content": [["x"]]}],
    "role": [{"role": "robot", "content": "x"}],
    "text": "x",
}
REFUSED = {
    **{
        name: json.dumps({"messages": messages}).encode() for name, messages in BAD_MESSAGES.items()
    },
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "bytes": b"\xff\xfe{",
    "list": b"[]",
    "two": json.dumps(ASKED | {"n": 2}).encode(),
    "none": json.dumps(ASKED | {"n": 0}).encode(),
    "stream": json.dumps(ASKED | {"stream": True}).encode(),
}


def test_malformed_requests_are_refused_once_and_change_nothing():
    async def requests(session, url, client):
        errors = {}
        for name, content in REFUSED.items():
            reply = await client.post(f"{url}/chat/completions", content=content)
            assert reply.status_code == 400 and reply.headers["x-should-retry"] == "false", name
            errors[name] = reply.json()["error"]["message"]
        body = ASKED | {"n": None, "stream": None, "tools": None, "logprobs": None}
        waiting = asyncio.create_task(client.post(f"{url}/chat/completions", json=body))
        assert await session.next_request() == Answer([])
        session.answer("x")
        return errors, (await waiting).status_code

    errors, status = serve(requests)
    assert status == 200
    assert "part of type image_url" in errors["image"] and "text only" in errors["image"]
    assert errors["calls"].startswith("message 1: ")


def test_what_is_no_http_is_refused():
    async def requests(session, url, client):
        port, path = int(url.split(":")[2].split("/")[0]), url.split("/", 3)[3]
        replies = []
        for text in (
            b"hello\r\n\r\n",
            f"POST /{path}/chat/completions HTTP/1.1\r\nhost: x\r\n".encode()
            + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
        ):  # fmt: skip
            source, sink = await asyncio.open_connection("127.0.0.1", port)
            sink.write(text)
            replies.append((await source.readline()).split()[1])
            sink.close()
        return replies

    assert serve(requests) == [b"400", b"431"]


def test_millions_of_characters_and_lone_surrogates_are_a_message():
    async def requests(session, url, client):
        asked = asyncio.create_task(client.post(f"{url}/chat/completions", json=ASKED))
        await session.next_request()
        session.answer("x")
        reply = (await asked).json()["choices"][0]["message"]
        text = "é\\ud83d" * 500_000
        added = json.dumps({"messages": [*QUESTION, reply, {"role": "user", "content": "@"}]})
        content = added.replace("@", text).encode()
        asked = asyncio.create_task(client.post(f"{url}/chat/completions", content=content))
        found = (await session.next_request()).observation
        session.close()
        await asked
        return len(found[0]["content"])

    assert serve(requests) == 1_000_000


def test_parts_and_null_are_texts():
    async def requests(session, url, client):
        parts = [QUESTION[0], QUESTION[1] | {"content": [{"type": "text", "text": "Guess."}]}]
        asked = asyncio.create_task(
            client.post(f"{url}/chat/completions", json={"messages": parts})
        )
        assert await session.next_request() == Answer([])
        session.answer("x")
        await asked
        added = [{"role": "user", "content": [{"type": "text", "text": "more"}]},
                 {"role": "tool", "tool_call_id": "1", "content": None}]  # fmt: skip
        body = {"messages": [*parts, {"role": "assistant", "content": "x"}, *added]}
        asked = asyncio.create_task(client.post(f"{url}/chat/completions", json=body))
        found = (await session.next_request()).observation
        session.close()
        await asked
        return found

    assert serve(requests) == [
        {"role": "user", "content": "more"},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]


def test_clients_own_timeout_and_retry_receive_the_turn_once():
    from openai import APITimeoutError, AsyncOpenAI

    async def requests(session, url, client):
        own = AsyncOpenAI(base_url=url, api_key="none", timeout=0.5, max_retries=2)

        async def ask(client=own):
            reply = await client.chat.completions.create(model="policy", messages=QUESTION)
            return reply.choices[0].message.content

        asked = asyncio.create_task(ask())
        assert await session.next_request() == Answer([])
        await asyncio.sleep(0.8)  # it has given up once, and waits again
        session.answer("a turn")
        assert await asked == "a turn"
        return session._requests.qsize()

    assert serve(requests) == 0

    async def late(session, url, client):
        own = AsyncOpenAI(base_url=url, api_key="none", timeout=0.2, max_retries=0)
        with pytest.raises(APITimeoutError):
            await own.chat.completions.create(model="policy", messages=QUESTION)
        await session.next_request()
        session.answer("a turn")  # that nobody has received
        own = own.with_options(timeout=30)
        reply = await own.chat.completions.create(model="policy", messages=QUESTION)
        return reply.choices[0].message.content, session._requests.qsize()

    assert serve(late) == ("a turn", 0)


def test_good_call_beside_a_malformed_one_keeps_both_visible():
    good = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    bad = "<tool_call>{oops</tool_call>"

    async def requests(session, url, client):
        body = ASKED | {"tools": [{"function": {"name": "f"}}]}
        asked = asyncio.create_task(client.post(f"{url}/chat/completions", json=body))
        await session.next_request()
        session.answer(f"I {bad} {good}.")
        return (await asked).json()["choices"][0]["message"]

    message = serve(requests)
    assert message["content"] == f"I {bad} ."
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["look"]


def test_turn_of_policy_is_unchanged():
    """No text of a turn passes through the client: only what comes after it is new."""

    async def check():
        session = Session(QUESTION, call_format="hermes")
        other = [{"role": "user", "content": "Something else."}]
        for first, messages in ((1, other), (3, QUESTION + other)):  # the prompt is the row's
            assert (await session.complete({"messages": messages}))[0] == 409
            with pytest.raises(RewrittenHistoryError, match=f"message {first} of the request"):
                await session.next_request()
        serving = asyncio.create_task(session.complete({"messages": QUESTION}))
        assert await session.next_request() == Answer([])
        session.answer("half \ud83d <think>x</think>  ")
        status, reply = await serving
        assert (status, reply["choices"][0]["message"]["content"]) == (
            200, "half \ud83d <think>x</think>  ")  # fmt: skip
        message = reply["choices"][0]["message"]
        for wrong in ({"content": "x"}, {"content": message["content"].strip()}, {"role": "user"}):
            status, _ = await session.complete({"messages": [*QUESTION, message | wrong]})
            assert status == 409

    asyncio.run(check())


TOOLS = [{"type": "function", "function": {"name": "ring", "parameters": {"properties": {}}}}]


@pytest.mark.parametrize(
    "field",
    [
        {"stop": ["x"]}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"},
        {"logit_bias": {"1": 2}}, {"top_logprobs": 3}, {"echo": True}, {"field_of_tomorrow": 1},
        {"enable_thinking": False}, {"add_generation_prompt": False},
    ],
)  # fmt: skip
def test_field_of_a_request_without_effect_is_refused(field):
    name = next(iter(field))
    status, reply = asyncio.run(
        Session(QUESTION, call_format="hermes").complete(ASKED | {"tools": TOOLS} | field)
    )
    assert status == 400
    assert reply["error"]["message"].startswith(f"{name}=")
    assert "would have no effect here" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"stop": None, "temperature": 0.2, "tool_choice": "auto", "user": "a"}, ["ring", "hang"]),
        ({"parallel_tool_calls": True}, ["ring", "hang"]),
        ({"parallel_tool_calls": False}, ["ring"]), ({"tool_choice": "none"}, []),
    ],
)  # fmt: skip
def test_calls_of_a_reply_are_those_that_the_request_allows(fields, names):
    async def check():
        session = Session(QUESTION, call_format="hermes")
        serving = asyncio.create_task(session.complete(ASKED | {"tools": TOOLS} | fields))
        await session.next_request()
        session.answer(
            '<tool_call>{"name": "ring", "arguments": null}</tool_call>'
            '<tool_call>{"name": "hang", "arguments": {"up": 1}}</tool_call>'
        )
        status, reply = await serving
        calls = reply["choices"][0]["message"].get("tool_calls", [])
        functions = [one["function"] for one in calls]
        assert (status, [one["name"] for one in functions]) == (200, names)
        assert [one["arguments"] for one in functions] == ["{}", '{"up": 1}'][: len(names)]

    asyncio.run(check())


def test_token_ids_extend_those_of_the_engine():
    """vLLM's route: the prompt, then everything so far and the tokens of an observation."""

    async def check():
        session = Session(QUESTION, call_format="hermes")
        session.receive(TurnTokens([5, 6], [7, 2], [-0.5, -0.25], is_complete=True))

        def ask(tokens, **more):
            return asyncio.create_task(session.generate({"token_ids": tokens} | more))

        for wrong in ([], [5, 6.0], "56", [5, True], [-1]):
            assert (await ask(wrong))[0] == 400
        assert (await ask([5, 6], features={"mm_hashes": {}}))[0] == 400
        assert (await ask([5, 6], sampling_params={"n": 2}))[0] == 400
        assert (await ask([5, 6], sampling_params=[2]))[0] == 400
        for wrong in ([5], [5, 7], [5, 6, 7]):  # the first request is the prompt of the row
            assert (await ask(wrong))[0] == 409
            with pytest.raises(RewrittenHistoryError, match="first 2 are fixed: they are the pro"):
                await session.next_request()
        asked = ask([5, 6], sampling_params={"logprobs": 1}, request_id="mine", model="m")
        assert await session.next_request() == Answer(token_ids=[])
        session.answer("x")
        status, reply = await asked
        (choice,) = reply["choices"]
        assert (status, reply["request_id"], reply["model"]) == (200, "mine", "m")
        assert (choice["token_ids"], choice["finish_reason"]) == ([7, 2], "stop")
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-0.5, -0.25]
        assert "prompt_token_ids" not in reply
        for wrong in ([5, 6, 7, 3, 9], [5, 6, 7]):  # a sampled token changed, or was left out
            assert (await ask(wrong))[0] == 409
            with pytest.raises(RewrittenHistoryError, match="first 4 are fixed: the policy sam"):
                await session.next_request()
        asked = ask([5, 6, 7, 2, 8, 9], return_token_ids=True)
        assert await session.next_request() == Answer(token_ids=[8, 9])
        session.receive(TurnTokens([8, 9], [3], [-1.0], is_complete=False))
        session.answer("y")
        _, reply = await asked
        assert reply["prompt_token_ids"] == [5, 6, 7, 2, 8, 9]
        assert reply["usage"] == {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["logprobs"] is None

    asyncio.run(check())


def test_tokens_of_a_message_only_if_they_are_asked_for():
    async def reply(**asking):
        session = Session(QUESTION, call_format="hermes")
        session.receive(TurnTokens([5, 6], [7, 2], [-0.5, -0.25], is_complete=True))
        asked = asyncio.create_task(session.complete({"messages": QUESTION} | asking))
        await session.next_request()
        session.answer("x")
        return (await asked)[1]

    plain = asyncio.run(reply())
    assert plain["usage"]["total_tokens"] == 4 and plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "x"}
    # as NeMo-Gym's model server asks
    asked = asyncio.run(reply(logprobs=True, return_tokens_as_token_ids=True))["choices"][0]
    fields = {"prompt_token_ids": [5, 6], "generation_token_ids": [7, 2],
              "generation_log_probs": [-0.5, -0.25]}  # fmt: skip
    assert asked["message"] == plain["choices"][0]["message"] | fields
    assert [one["token"] for one in asked["logprobs"]["content"]] == ["token_id:7", "token_id:2"]
