"""Checks of an environment: settings against each other, then one answer in a worker process."""

import re

import pytest

from megatron_rl.config import parse_config
from megatron_rl.preflight.trials import (
    VerifierTrial,
    call_format_problem,
    start_environment_trial,
    with_tools,
)
from megatron_rl.types import GradeResult, Prompt
from tests.character_tokenizer import build_tokenizer

TALKING = "tests.functional.talking"


def config(environment, **sections):
    values = {
        "model": {"path": "m"},
        "data": {"train": "t", "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 32},
        "environment": {"name": f"{TALKING}:Digits", "max_context_tokens": 64} | environment,
    }
    for name, given in sections.items():
        values[name] = values.get(name, {}) | given if isinstance(given, dict) else given
    return parse_config(values)


def test_context_replaces_sum_of_prompt_and_response():
    assert config({}).max_model_tokens == config({}).max_packed_tokens == 64
    assert config({"max_rewrites": 2}).max_packed_tokens == 3 * 64
    assert config({}).environment.max_turn_tokens is None


def test_tools_become_argument_of_chat_template():
    tools = [{"type": "function"}]
    shown = with_tools(config({}), tools)
    assert shown.data.template_arguments == {"tools": tools}
    assert with_tools(config({}), []).data.template_arguments == {}
    assert with_tools(config({}, data={"template": "raw"}), tools).data.template_arguments == {}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (f"{TALKING}:Digits", "{}", None),
        (f"{TALKING}:Nothing", "{}", "has no function Nothing"),
        (f"{TALKING}:Refuses", "{}", "refuses rows like this"),
    ],
)
def test_environment_is_loaded_and_tested_on_row(name, row, message, tmp_path):
    tokenizer = build_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    settings = config({"name": name}, model={"path": str(tmp_path)})
    prompt = Prompt(0, ({"role": "user", "content": "1+1?"},), (1,), "2", "s", row)
    with start_environment_trial(settings) as trial:
        problems = trial.problems() or trial.try_on(prompt)
    if message is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"environment.name={name}: ") and message in problem
        assert "\n" not in problem


CODER = (  # as of Qwen3.5
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}<tool_call>\n"
    "<function={{ f.name }}>\n"
    "{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
GLM = (  # as of GLM-4.5
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}\n<tool_call>{{ f.name }}\n"
    "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}"
)
HERMES = (  # as of Qwen2.5
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}"
)
TEXTS = (  # of arguments that are given as texts
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}</tool_call>'
    "{% endfor %}"
)
LLAMA = (
    "{% for c in m.tool_calls or [] %}"
    "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}{% endfor %}"
)
MISTRAL = "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}"
WEIGH = {"type": "function", "function": {"name": "weigh", "parameters": {"properties": {
    "name": {"type": "string"}, "pieces": {"type": "integer"}, "exact": {"type": "boolean"},
    "unit": {"type": "string", "enum": ["kg", "t"]}, "boxes": {"type": "array"}}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "call_format", "cure"),
    [
        (CODER, "hermes", "set call_format = 'qwen3_coder' in the class"),
        (GLM, "hermes", "set call_format = 'glm45' in the class"),
        (LLAMA, "hermes", "set call_format = 'llama3_json'"),
        (HERMES, "qwen3_coder", "set call_format = 'hermes'"),
        (MISTRAL, "hermes", "of the formats .* none does: repair chat_template"),
        (CODER, "qwen3_coder", None), (GLM, "glm45", None), (HERMES, "hermes", None),
        (TEXTS, "hermes", None), (LLAMA, "llama3_json", None), ("", "hermes", None),
        ("{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}", "hermes", None),
    ],
)  # fmt: skip
def test_calls_of_the_template_are_read_by_the_format_of_the_class(calls, call_format, cure):
    tokenizer = build_tokenizer(64)
    shown = "{% if tools %}Call as <tool_call>{}</tool_call>: {{ tools | tojson }}{% endif %}"
    body = "{{ m.role }}: {{ m.content }}<think>\n\n</think>"
    tokenizer.chat_template = shown + "{% for m in messages %}" + body + calls + "{% endfor %}"
    found = call_format_problem(call_format, WEIGH, tokenizer, {"tools": [WEIGH]})
    assert (found is None) == (cure is None), found
    if cure is not None:
        assert re.search(cure, found) and f"call_format={call_format!r} does not read" in found


class _Returning:
    """A pool whose verifier returns rewards by name."""

    def __init__(self, names):
        self.names = names

    def start(self): ...

    def try_on(self, item):
        return [GradeResult(1.0, "", None, rewards=dict.fromkeys(self.names, 1.0))] * 2


@pytest.mark.parametrize(
    ("names", "weights", "is_refused"),
    [
        (["acc", "score"], {}, True), (["acc", "score"], {"acc": 0, "score": 1}, False),
        (["score"], {}, False), (["correct", "format"], {}, False), ([], {}, False),
    ],
)  # fmt: skip
def test_score_of_verl_is_not_added_to_what_verl_only_records(names, weights, is_refused):
    prompt = Prompt(0, ({"role": "user", "content": "?"},), (1,), "1", "s")
    reward = config({}, reward={"verifier": "my:score", "weights": weights}).reward
    problems = VerifierTrial(reward, _Returning(names)).problems(prompt, keep_best=False)
    cure = "set reward.weights={acc: 0, score: 1}, or other weights"
    assert bool(problems) == is_refused and all(one.endswith(cure) for one in problems)
