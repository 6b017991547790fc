"""Loss masks of published chat templates: ours next to the templates' own `{% generation %}` marks.

    python -m research.tools.template_masks FOLDER

FOLDER has the templates of TRL (`trl/chat_templates`): those of the publishers, and copies in which
TRL has marked the assistant's tokens. Tokens are bytes and the templates' special tokens.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.demonstrations import ConversationTokenizer

BAR = "\uff5c"  # of full width, in the tokens of DeepSeek
MODELS = {  # file, and the token that ends a response
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "deepseekv3": f"<{BAR}end▁of▁sentence{BAR}>",
    "deepseek_r1_distill": f"<{BAR}end▁of▁sentence{BAR}>",
    "glm4moe": "<|user|>",
}
THINKING = ("qwen3", "deepseek_r1_distill", "deepseekv3", "glm4moe")
SPECIAL = re.compile(rf"<[|{BAR}][^<>\s]+?[|{BAR}]>|</?(?:think|tool_call)>|<\w+_of_turn>")


def build(template: str, end: str) -> Any:
    """Return a tokenizer of bytes and the special tokens in a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = sorted({*SPECIAL.findall(template), end, "<bos>"})
    core.add_special_tokens([AddedToken(one, special=True) for one in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


def talk(name: str) -> list[dict[str, str]]:
    """Return two turns; with thinking where the template knows it."""
    thought = "<think>\nA thought.\n</think>\n\n" if name in THINKING else ""
    return [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": f"{thought}It is 2."},
        {"role": "user", "content": "and é?"},
        {"role": "assistant", "content": f"{thought}No number.\nSorry"},
    ]


def ours(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    """Return the text before the last answer, and the trained text of it."""
    reader = ConversationTokenizer(tokenizer, turns="last", stop=(tokenizer.eos_token_id,))
    ids, given = reader.tokenize((tuple(messages), ()))
    return tokenizer.decode(ids), tokenizer.decode(given.token_ids)


def theirs(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    """Return the text before the last marked answer, and its marked text."""
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    marks, ids = found["assistant_masks"], found["input_ids"]
    end = max(n for n, one in enumerate(marks) if one) + 1
    first = end
    while first and marks[first - 1]:
        first -= 1
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:end])


def main() -> None:
    """Print a row for each answer of each template."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print("| template | answer | same text | only marked there, before and after |")
    print("|---|---|---|---|")
    for name, end in MODELS.items():
        plain, marked = ((folder / f"{name}{x}.jinja").read_text() for x in ("", "_training"))
        for turn, count in enumerate((2, 4), start=1):
            messages = talk(name)[:count]
            before, answer = ours(build(plain, end), messages)
            there, block = theirs(build(marked, end), messages)
            whole, position = there + block, len(before)
            same = whole.startswith(before + answer)
            extra = (whole[len(there) : position], whole[position + len(answer) :])
            print(f"| {name} | {turn} | {'yes' if same else 'no'} | {extra[0]!r}, {extra[1]!r} |")
            if not same:
                print(f"  ours {before + answer!r}\n  there {whole!r}")


if __name__ == "__main__":
    main()
