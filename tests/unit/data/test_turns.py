"""Text of the chat template between two turns, with the end of a turn once."""

import pytest

from megatron_rl.data.rendering import TurnRenderer, as_messages
from megatron_rl.errors import UserError
from tests.character_tokenizer import build_tokenizer

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
    assert one.without_repeated_end(tokens, turn=[9, end], stop=[end]) == tokens[1:]
    assert one.without_repeated_end(tokens, turn=[end, 9], stop=[end]) == tokens
    assert one.without_repeated_end(tokens, turn=[9, end], stop=[]) == tokens  # no end, but a token


HEADERS = "{% for m in messages %}<|start|>{{ m['role'] }}={{ m['content'] }}"
ASSISTANT = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant={% endif %}"
TEMPLATES = {  # of published models in essence: the template, other ends, what follows such an end
    "gpt-oss": (
        HEADERS + "{% if m['role'] == 'assistant' and loop.last and not add_generation_prompt %}"
        "<|return|>{% else %}<|end|>{% endif %}" + ASSISTANT,
        ("<|return|>", "<|call|>"), "<|start|>user=7<|end|><|start|>assistant=",
    ),
    "llama": (HEADERS + "<|eot|>" + ASSISTANT, ("<|eom|>",),
              "<|start|>user=7<|eot|><|start|>assistant="),
    "gemma": (
        HEADERS + "<|eot|>,{% endfor %}{% if add_generation_prompt %}<|start|>model={% endif %}",
        ("<|return|>",), ",<|start|>user=7<|eot|>,<|start|>model=",
    ),
    "glm": (  # without ends: the next role ends a turn, and must stay after another end
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|return|>",), "<|user|>7<|assistant|>",
    ),
}  # fmt: skip
SPECIAL = ("<|start|>", "<|return|>", "<|call|>", "<|eot|>", "<|eom|>", "<|user|>", "<|assistant|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_that_ended_with_another_end_has_one(name):
    template, ends, after = TEMPLATES[name]
    one = renderer(template)
    one.tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    ids = one.tokenizer.convert_tokens_to_ids
    stop = [ids(end) for end in ends]
    tokens = one.render((PROMPT[1],), as_messages("7"))
    for end in stop:
        found = one.without_repeated_end(tokens, turn=[9, end], stop=stop)
        assert one.tokenizer.decode(found) == after
    assert one.without_repeated_end(tokens, turn=[9], stop=stop) == tokens  # a turn that was cut


def test_role_that_template_leaves_out_is_refused():
    """As Phi-3's template does with `tool`; also next to a message of another role."""
    one = renderer(
        "{% for m in messages %}{% if m['role'] in ('user', 'assistant', 'system') %}"
        "{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    one.render(PROMPT, as_messages("7"))
    for observation in (
        [{"role": "tool", "content": "7"}],
        [*as_messages("7"), {"role": "tool", "content": "7"}],
    ):
        with pytest.raises(UserError, match="leaves out an observation with the role tool"):
            one.render(PROMPT, observation)


def test_template_without_roles_and_raw_prompt():
    plain = renderer("{% for m in messages %}{{ m['content'] }}{% endfor %}:")
    assert plain.tokenizer.decode(plain.render(PROMPT, as_messages("7"))) == "7:"
    raw = renderer(None, template="raw")
    assert raw.tokenizer.decode(raw.render(PROMPT, as_messages("7"))) == "7"
    assert raw.render(PROMPT, as_messages("")) == []


def test_text_equal_to_marker_changes_nothing():
    from megatron_rl.data import rendering

    one = renderer(CHAT)
    prompt = ({"role": "user", "content": rendering._MARK},)
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
