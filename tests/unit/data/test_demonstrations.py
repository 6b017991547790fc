"""Tokens of conversations that are trained as they are, and which of them are the assistant's."""

import itertools
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.demonstrations import ConversationTokenizer
from megatron_rl.data.prompts import PromptTable, load_prompts, write_prompts
from megatron_rl.errors import UserError

# In essence the templates of published models, with the marks that transformers reads. A mark
# surrounds what the policy writes: the text after the generation prompt, with the end of the turn.
TEMPLATES = {
    "qwen3": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3.1": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    "gemma3": (
        "{{ '<bos>' }}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "deepseek": (
        "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|Assistant|>' }}"
        "{% generation %}{{ m.content + '<|end_of_sentence|>' }}{% endgeneration %}"
        "{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}",
        "<|end_of_sentence|>",
    ),
    # Other ends for the last message and for earlier ones: each answer begins another sequence.
    "gpt-oss": (
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% endgeneration %}{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        "<|return|>",
    ),
}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
    "<|end_of_sentence|>", "<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>",
)  # fmt: skip
TALK = [
    {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "and é?"}, {"role": "assistant", "content": "No number.\nSorry"},
]  # fmt: skip
# Drops thinking of earlier turns, and opens it in the generation prompt, as R1's distillations do.
DROPS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}"
    "{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' + OPENS }}{% endif %}"
)


def build(template, end):
    """A tokenizer of one token per byte, and the special tokens of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


def reader(chat_template, end, **options):
    tokenizer = build(chat_template, end)
    return ConversationTokenizer(tokenizer, stop=(tokenizer.eos_token_id,), **options)


def sequences(ids, given):
    """(tokens, mask) of each sequence that is trained."""
    tokens = [*ids, *given.token_ids]
    own = [False] * len(ids) + [True] * len(given.token_ids)
    for first, end in given.observed:
        own[len(ids) + first : len(ids) + end] = [False] * (end - first)
    bounds = [0, *(len(ids) + one for one in given.restarts), len(tokens)]
    return [(tokens[a:b], own[a:b]) for a, b in itertools.pairwise(bounds)]


def marked(tokenizer, messages):
    """Tokens and mask by transformers' reading of the template's own marks, to the last answer."""
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [bool(one) for one in found["assistant_masks"]]
    count = max(n for n, one in enumerate(mask) if one) + 1
    return found["input_ids"][:count], mask[:count]


@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_are_those_of_the_templates_own_marks(name):
    one = reader(*TEMPLATES[name])
    ids, given = one.tokenize((TALK[:2], ()))
    assert sequences(ids, given) == [marked(one.tokenizer, TALK[:2])]
    ids, given = one.tokenize((TALK, ()))
    if name == "gpt-oss":  # earlier answers end otherwise in the context of later ones
        first, second = sequences(ids, given)
        assert first == marked(one.tokenizer, TALK[:2])
        tokens, mask = marked(one.tokenizer, TALK)
        begin = one.tokenizer.decode(tokens).rindex("<|channel|>")
        first_of_last = len(one.tokenizer(one.tokenizer.decode(tokens)[:begin])["input_ids"])
        assert second == (tokens, [n >= first_of_last for n in range(len(mask))])
    else:
        assert sequences(ids, given) == [marked(one.tokenizer, TALK)]


def test_last_turn_alone():
    one = reader(*TEMPLATES["qwen3"], turns="last")
    ids, given = one.tokenize((TALK, ()))
    assert one.tokenizer.decode(given.token_ids) == "No number.\nSorry<|im_end|>"
    assert one.tokenizer.decode(ids).endswith("<|im_start|>assistant\n") and not given.observed


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_thinking_that_the_template_drops_is_trained_in_the_context_of_its_own_turn(opens):
    one = reader(DROPS.replace("OPENS", repr(opens)), "<|end_of_sentence|>")
    talk = [TALK[0], {"role": "assistant", "content": "<think>\na\n</think>\n\n2"},
            TALK[2], {"role": "assistant", "content": "<think>\nb\n</think>\n\n3"}]  # fmt: skip
    ids, given = one.tokenize((talk, ()))
    texts = [
        (one.tokenizer.decode(tokens),
         one.tokenizer.decode([t for t, own in zip(tokens, mask, strict=True) if own]))
        for tokens, mask in sequences(ids, given)
    ]  # fmt: skip
    end = "<|end_of_sentence|>"
    answers = ["<think>\na\n</think>\n\n2" + end, "<think>\nb\n</think>\n\n3" + end]
    assert [own for _, own in texts] == [one.removeprefix(opens) for one in answers]
    assert texts[0][0] == "<|User|>1+1?<|Assistant|>" + answers[0]
    context = f"<|User|>1+1?<|Assistant|>\n\n2{end}<|User|>and é?<|Assistant|>"
    assert texts[1][0] == context + answers[1]


def test_answer_without_the_thinking_that_the_prompt_opens_is_refused():
    one = reader(DROPS.replace("OPENS", "'<think>\n'"), "<|end_of_sentence|>")
    with pytest.raises(UserError, match="message 2: the chat template opens the assistant's think"):
        one.tokenize((TALK[:2], ()))


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ([TALK[0], {"role": "assistant", "content": "a<|im_end|>b"}], "message 2 contains '<|im_e"),
        ([TALK[1]], "begins with a message of the assistant"),
    ],
)
def test_message_that_cannot_be_trained_is_refused(talk, words):
    with pytest.raises(UserError, match=words.replace("|", r"\|")):
        reader(*TEMPLATES["qwen3"]).tokenize((talk, ()))


def test_answer_without_a_template_ends_with_the_end_of_text():
    one = reader("", "<|im_end|>", template="raw")
    ids, given = one.tokenize((TALK[:2], ()))
    assert one.tokenizer.decode(ids) == "1+1?"
    assert one.tokenizer.decode(given.token_ids) == "It is 2.<|im_end|>"
    with pytest.raises(UserError, match=r"sft\.turns=last"):
        one.tokenize((TALK, ()))


ROWS = [
    {"messages": TALK[:2]},
    {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "It is 2."}]},
    {"prompt": "1+1?", "completion": "It is 2."},
    {"prompt": TALK[:1], "completion": TALK[1:2]},
    {"prompt": TALK[:2]},
    {"prompt": "1+1?", "prompt_id": "a", "messages": TALK[:2]},  # UltraChat, No Robots
    {"prompt": json.dumps(TALK[:1]), "completion": "It is 2."},
]


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_rows_of_all_published_forms_are_one_conversation(row, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    one = reader(*TEMPLATES["qwen3"])
    (prompt,) = load_prompts(file, one.tokenizer, max_prompt_tokens=99, conversations=one)
    ids, given = one.tokenize((TALK[:2], ()))
    assert list(prompt.token_ids) == ids and prompt.demonstration == given
    write_prompts(tmp_path / "table", [prompt])
    assert PromptTable(tmp_path / "table")[0] == prompt


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1?"}, "line 1: prompt has no answer of the assistant at its end"),
        ({"messages": TALK[:1]}, "line 1: messages has no answer"),
        ({"messages": TALK[:2], "completion": "x"}, "completion has another answer"),
        ({"question": "1+1?"}, "has no column prompt"),
    ],
)
def test_row_without_one_answer_is_refused(row, words, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    one = reader(*TEMPLATES["qwen3"])
    with pytest.raises(UserError, match=words):
        load_prompts(file, one.tokenizer, max_prompt_tokens=99, conversations=one)


def test_length_limit_counts_the_longest_sequence_with_its_answer(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": TALK[:count]}) + "\n" for count in (2, 4)))
    one = reader(*TEMPLATES["qwen3"])
    options = {"conversations": one}
    size = len(marked(one.tokenizer, TALK)[0])
    assert len(load_prompts(file, one.tokenizer, max_prompt_tokens=size, **options)) == 2
    with pytest.raises(UserError, match=rf"line 2: .* rollout.max_response_tokens={size - 1}"):
        load_prompts(file, one.tokenizer, max_prompt_tokens=size - 1, **options)
