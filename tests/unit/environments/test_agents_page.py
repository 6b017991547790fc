"""The environments of docs/agents.md do what the page claims."""

import asyncio
import json
import re
from pathlib import Path

from megatron_rl.environments import Answer
from tests.unit.environments.test_pool import Talk, open_pool

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
FILES = dict(re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE, re.DOTALL))


def load(name, file):
    """A class of one of the page's files."""
    found = {}
    exec(compile(FILES[file], file, "exec"), found)
    return found[name]


def talk(environment, *turns):
    """The answers to these turns."""
    return [asyncio.run(environment.step(turn)) for turn in turns]


def test_calculator_computes_and_returns_errors():
    environment = load("Calculator", "my_agent.py")({"answer": "51"}, 0)
    calls = [json.dumps({"name": "calculate", "arguments": {"expression": text}})
             for text in ("3*17", "3", "1/0")]  # fmt: skip
    *answers, last = talk(environment, *(f"<tool_call>{c}</tool_call>" for c in calls), "It is 51")
    contents = [answer.observation[0]["content"] for answer in answers]
    assert contents[0] == "51"
    assert contents[1].startswith("error: AttributeError")
    assert contents[2].startswith("error: ZeroDivisionError")
    assert last == Answer(reward=1.0, done=True, reason="answered")
    (schema,) = type(environment).describe_tools()
    assert list(schema["function"]["parameters"]["properties"]) == ["expression"]


def test_game_ends_when_number_is_found_or_after_seven_guesses():
    game = load("Guess", "my_game.py")
    answers = talk(game({"answer": "40"}, 0), "", "50", "30", "40")
    assert [one.observation for one in answers[:3]] == ["higher", "lower", "higher"]
    assert answers[3] == Answer(reward=1.0, done=True, reason="found")
    assert talk(game({"answer": "40"}, 0), *"1234567")[-1].reason == "not found"


def test_openai_agent_gets_its_reward(tmp_path, monkeypatch):
    (tmp_path / "my_openai_agent.py").write_text(FILES["my_openai_agent.py"])
    monkeypatch.syspath_prepend(tmp_path)
    row = json.dumps({"question": "Guess.", "answer": "40"})
    with open_pool("Guesser", module="my_openai_agent") as pool:
        (answers,) = Talk(pool, row=row)([["50", "40"]])
    assert answers[0] == Answer([{"role": "user", "content": "Wrong."}])
    assert answers[1] == Answer(reward=1.0, done=True, reason="agent ended")
