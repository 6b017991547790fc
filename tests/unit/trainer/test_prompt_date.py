"""Prompts of chat templates that write the date do not change with the day."""

import datetime

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.data.rendering import tokenize_messages
from megatron_rl.data.turns import TurnRenderer, as_messages
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.prompt_date import fix_date
from tests.character_tokenizer import build_tokenizer

# As in Llama 3.2, where `date_string` may be given, and in gpt-oss, whose date is in a macro.
TEMPLATES = {
    "variable": "{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%Y-%m-%d') %}{% endif %}{{ date_string }}",
    "macro": "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}",
}
CHAT = "{% for m in messages %}:{{ m['content'] }}{% endfor %}"


def make_config(folder, **data):
    return parse_config({"model": {"path": str(folder)}, "data": {"train": "t", **data}})


@pytest.mark.parametrize("kind", TEMPLATES)
def test_prompts_and_turns_have_the_date_of_the_config(kind):
    config = make_config("m", date=datetime.date(2024, 7, 26))  # as YAML reads 2024-07-26
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = TEMPLATES[kind] + CHAT
    prompt = as_messages("1+1?")
    tokens = tokenize_messages(prompt, tokenizer, arguments=config.data.rendering)
    assert tokenizer.decode(tokens) == "2024-07-26:1+1?"
    # Templates may write the date at the end, after a turn.
    tokenizer.chat_template = CHAT + TEMPLATES[kind]
    renderer = TurnRenderer(tokenizer, arguments=config.data.rendering)
    assert tokenizer.decode(renderer.render(prompt, as_messages("7"))) == ":72024-07-26"


def test_run_keeps_the_date_of_its_first_start(tmp_path):
    model, lines = tmp_path / "model", []
    model.mkdir()
    directory = RunDirectory(tmp_path / "run")
    today = datetime.date.today().isoformat()
    for file, wanted in (("config.json", None), ("chat_template.jinja", today)):
        (model / file).write_text(TEMPLATES["macro"] + CHAT, encoding="utf-8")
        started = fix_date(make_config(model), directory, echo=lines.append)
        assert started.data.date == wanted
    assert lines == [f"the chat template writes the date into prompts: {today} (data.date)"]
    directory.create(make_config(model, date="2024-07-26"))  # on that day
    resumed = make_config(model)
    assert fix_date(resumed, directory, echo=lines.append).data.date == "2024-07-26"
    assert directory.changes(resumed) == {}
    assert directory.changes(make_config(model, date=today)) == {
        "data.date": ("2024-07-26", today)}  # fmt: skip


def test_impossible_date_is_refused():
    with pytest.raises(
        ConfigError, match=r"data.date=.26 Jul 2024.: .*YYYY-MM-DD, such as 2026-01-31"
    ):
        make_config("m", date="26 Jul 2024")
