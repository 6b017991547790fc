"""Text of the chat template between two turns, with the end of a turn once."""

import pytest

from megatron_rl.apps.tasks.tokens import build_tokenizer
from megatron_rl.data.turns import TurnRenderer, as_messages, without_repeated_end
from megatron_rl.errors import UserError

PROMPT = ({"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"})
CHAT = (
    "{% for message in messages %}{{ message['role'][0] }}={{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def renderer(chat_template, **options):
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = chat_template
    return TurnRenderer(tokenizer, **options)


def test_observation_equals_rendering_of_whole_conversation():
    one = renderer(CHAT)
    whole = [*PROMPT, {"role": "assistant", "content": "x?"}, {"role": "tool", "content": "7"},
             {"role": "user", "content": "so?"}]  # fmt: skip
    text = one.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    tokens = one.render(PROMPT, whole[3:])
    assert text.endswith(one.tokenizer.decode(tokens)) and "x?" not in one.tokenizer.decode(tokens)
    assert one.tokenizer.decode(tokens) == "<|end|>t=7<|end|>u=so?<|end|>a="


def test_sampled_end_is_not_repeated_and_cut_turn_gets_one():
    one = renderer(CHAT)
    end = one.tokenizer.eos_token_id
    tokens = one.render(PROMPT, as_messages("7"))
    assert tokens[0] == end
    assert without_repeated_end(tokens, turn=[9, end], stop=[end]) == tokens[1:]
    assert without_repeated_end(tokens, turn=[end, 9], stop=[end]) == tokens
    assert without_repeated_end(tokens, turn=[9, end], stop=[]) == tokens  # no end, but a token


def test_template_without_roles_and_raw_prompt():
    plain = renderer("{% for m in messages %}{{ m['content'] }}{% endfor %}:")
    assert plain.tokenizer.decode(plain.render(PROMPT, as_messages("7"))) == "7:"
    raw = renderer(None, template="raw")
    assert raw.tokenizer.decode(raw.render(PROMPT, as_messages("7"))) == "7"
    assert raw.render(PROMPT, as_messages("")) == []


def test_text_equal_to_marker_changes_nothing():
    from megatron_rl.data import turns

    one = renderer(CHAT)
    prompt = ({"role": "user", "content": turns._MARK},)
    assert one.tokenizer.decode(one.render(prompt, as_messages("7"))) == "<|end|>u=7<|end|>a="


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{{ raise_exception('no tools here') }}", r"refuses .* messages of tool: no tools here"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
         "leaves out the text of an assistant's message"),
    ],
)  # fmt: skip
def test_template_that_cannot_continue_is_refused(chat_template, message):
    with pytest.raises(UserError, match=message):
        renderer(chat_template).render(PROMPT, [{"role": "tool", "content": "7"}])
