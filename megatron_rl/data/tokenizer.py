"""Load the tokenizer of a model folder and check that training can use it."""

import json
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import UserError

Template = Literal["chat", "raw"]

# AutoTokenizer takes these classes for the architectures that are supported (transformers' table
# of tokenizers by model_type). Its import takes two seconds more, most of them for torch.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def find_tokenizer(folder: str | Path) -> None:
    """ValueError if a model folder has no tokenizer: transformers would make up an empty one."""
    if not any(list(Path(folder).glob(name)) for name in ("tokenizer*", "vocab*", "*.model")):
        raise UserError(
            f"{folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, ...); copy "
            "the tokenizer's files of the model that its weights come from"
        )


def load_tokenizer(folder: str | Path, *, template: Template = "chat") -> Any:
    """Load the tokenizer of a Hugging Face model folder.

    Raises ValueError if there is none, or if it lacks what training needs: a chat template, which
    turns messages into a prompt, and an end-of-sequence token, which ends a response.
    """
    if not Path(folder).is_dir():
        raise UserError(f"model folder {folder} does not exist")
    find_tokenizer(folder)
    try:
        tokenizer = _class_of(Path(folder)).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the libraries below raise many kinds, Exception itself among them
        reason = str(error).strip().splitlines()[0:1]
        raise UserError(
            f"{folder} holds no tokenizer that can be loaded ({', '.join(reason)}); copy the "
            "tokenizer's files again from the model that its weights come from"
        ) from error
    check_tokenizer(tokenizer, name=str(folder), template=template)
    return tokenizer


def check_tokenizer(
    tokenizer: Any, *, name: str = "the tokenizer", template: Template = "chat"
) -> None:
    """Raise UserError if the end-of-sequence token or a required chat template is missing."""
    if template == "chat" and not tokenizer.chat_template:
        raise UserError(
            f"{name}: no chat template; for a base model set data.template=raw (the question's "
            "text as it is), or add chat_template.jinja, or use the instruct model's"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: no eos_token, so a response could never end; name one in "
            "tokenizer_config.json"
        )


def describe_outside(tokenizer: Any, *, folder: str | Path, vocab_size: int) -> str:
    """Explain why a prompt has a token outside the model's vocabulary."""
    return (
        f"{folder}: its tokenizer has {len(tokenizer):,} tokens, but vocab_size in config.json is "
        f"{vocab_size:,}: they belong to different models; copy the tokenizer's files of the model "
        "that the weights come from"
    )


def _class_of(folder: Path) -> Any:
    """The class that AutoTokenizer would choose, or AutoTokenizer itself where that is not sure."""
    named, model = (
        _read(folder / file).get(key, "")
        for file, key in (
            ("tokenizer_config.json", "tokenizer_class"),
            ("config.json", "model_type"),
        )
    )
    plain = (folder / "tokenizer.json").is_file() and "auto_map" not in _read(
        folder / "tokenizer_config.json"
    )
    if plain and named in _QWEN and model in _QWEN_MODELS:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer
    if plain and named in _GENERIC and model == "llama":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _read(file: Path) -> dict[str, Any]:
    """A JSON object of the folder; empty where it is none: AutoTokenizer complains."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
