"""The default verifier is that of the prompts: some open the thinking that a response continues."""

import datetime

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.config.sections import AFTER_THINKING, MATH_ANSWER
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.rendering import TurnRenderer, as_messages, tokenize_messages
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer.startup import choose_verifier, fix_date
from tests.character_tokenizer import build_tokenizer
from tests.unit.data.tokenizer_folders import byte_level, write_folder

USER = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Assistant: "
QUESTION = "2+3? Begin with <think>."


def make_config(folder, **reward):
    data = {"train": "t.jsonl", "template": "chat"}
    return parse_config({"model": {"path": str(folder)}, "data": data, "reward": reward})


def make_prompts(folder, end, *, question=QUESTION, special=()):
    """Write a model folder whose template ends with `end`, and return it and its only prompt."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(special))
    write_folder(folder, tokenizer, model_type="qwen2", chat_template=USER + end)
    rows = folder / "rows.csv"
    rows.write_text(f'prompt,reward_model.ground_truth\n"{question}",5\n')
    return load_prompts(rows, load_tokenizer(folder), max_prompt_tokens=99)


@pytest.mark.parametrize(
    ("end", "special", "verifier"),
    [
        ("", (), MATH_ANSWER),  # the user's text mentions a mark
        ("<think>\n", (), AFTER_THINKING),  # R1-Distill, QwQ, Qwen3-Thinking
        ("<thought>\n", (), AFTER_THINKING),  # EXAONE-Deep
        ("◁think▷", (), AFTER_THINKING),  # Kimi
        ("</think>", (), MATH_ANSWER),  # DeepSeek-V3.1
        ("<think>\nOkay, let me see.", (), AFTER_THINKING),
        ("<think>\n\n</think>\n\n", (), MATH_ANSWER),  # Qwen3 with enable_thinking: false
        # No response shows the end of thinking if it is a special token, which decoding removes.
        ("[THINK]", ("[THINK]", "[/THINK]"), MATH_ANSWER),
    ],
)
def test_first_prompt_decides(tmp_path, end, special, verifier):
    prompts = make_prompts(tmp_path, end, special=special)
    lines = []
    config = choose_verifier(
        make_config(tmp_path), RunDirectory(tmp_path / "run"), prompts, echo=lines.append
    )
    assert config.reward.verifier == verifier
    assert (
        lines
        == [
            "prompts end inside thinking: a response that does not end it has no answer "
            f"(reward.verifier={AFTER_THINKING}; set another one to change this)"
        ][: verifier == AFTER_THINKING]
    )


def test_verifier_of_the_user_is_kept(tmp_path):
    prompts = make_prompts(tmp_path, "<think>\n")
    given = make_config(tmp_path, verifier=MATH_ANSWER)
    assert choose_verifier(given, RunDirectory(tmp_path / "run"), prompts, echo=print) is given


@pytest.mark.parametrize("first", [MATH_ANSWER, AFTER_THINKING])
def test_resumed_run_keeps_the_verifier_of_its_first_start(tmp_path, first):
    """Also one of a release that always took `verify_math_answer`."""
    prompts = make_prompts(tmp_path, "<think>\n" if first == MATH_ANSWER else "")
    directory, given = RunDirectory(tmp_path / "run"), make_config(tmp_path)
    directory.create(make_config(tmp_path, verifier=first))
    other = {MATH_ANSWER: AFTER_THINKING, AFTER_THINKING: MATH_ANSWER}[first]
    restarted = choose_verifier(given, directory, prompts, echo=print)
    assert restarted.reward.verifier == other  # the first start failed before its first step
    (directory.path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert choose_verifier(given, directory, prompts, echo=print).reward.verifier == first
    assert directory.changes(given) == {}
    # A verifier of the user is a setting: the run is another one without it.
    directory.create(make_config(tmp_path, verifier="my_rewards:score"))
    assert directory.changes(given) == {"reward.verifier": ("my_rewards:score", None)}


# As in Llama 3.2, where `date_string` may be given, and in gpt-oss, whose date is in a macro.
TEMPLATES = {
    "variable": "{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%Y-%m-%d') %}{% endif %}{{ date_string }}",
    "macro": "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ day() }}",
}
CHAT = "{% for m in messages %}:{{ m['content'] }}{% endfor %}"


def make_config_of_prompt_date(folder, **data):
    return parse_config({"model": {"path": str(folder)}, "data": {"train": "t", **data}})


@pytest.mark.parametrize("kind", TEMPLATES)
def test_prompts_and_turns_have_the_date_of_the_config(kind):
    config = make_config_of_prompt_date(
        "m", date=datetime.date(2024, 7, 26)
    )  # as YAML reads 2024-07-26
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
        started = fix_date(make_config_of_prompt_date(model), directory, echo=lines.append)
        assert started.data.date == wanted
    assert lines == [f"the chat template writes the date into prompts: {today} (data.date)"]
    directory.create(make_config_of_prompt_date(model, date="2024-07-26"))  # on that day
    resumed = make_config_of_prompt_date(model)
    assert fix_date(resumed, directory, echo=lines.append).data.date == "2024-07-26"
    assert directory.changes(resumed) == {}
    assert directory.changes(make_config_of_prompt_date(model, date=today)) == {
        "data.date": ("2024-07-26", today)}  # fmt: skip


def test_impossible_date_is_refused():
    with pytest.raises(
        ConfigError, match=r"data.date=.26 Jul 2024.: .*YYYY-MM-DD, such as 2026-01-31"
    ):
        make_config_of_prompt_date("m", date="26 Jul 2024")
