"""Load the tokenizer of a model folder and check that training can use it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_rl.data.tokenizer_code import import_class
from megatron_rl.data.tokenizer_probe import check_tokenizer_files
from megatron_rl.errors import UserError

Template = Literal["chat", "raw"]

# Classes of transformers that split texts for vocab.json and merges.txt as their models need it.
_BYTE_LEVEL = ("Qwen2Tokenizer", "GPT2Tokenizer")
# Files of tokenizers, which say nothing about how a text is split before its pieces are joined.
_OTHER_FILES = ("*.model", "*.model.*", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt")


def find_tokenizer(folder: str | Path) -> None:
    """ValueError if a model folder has no tokenizer: transformers would make up an empty one."""
    if not any(list(Path(folder).glob(name)) for name in ("tokenizer*", "vocab*", "*.model")):
        raise UserError(
            f"{folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, ...); copy "
            "the tokenizer's files of the model that its weights come from"
        )


def load_tokenizer(
    folder: str | Path, *, template: Template = "chat", trust_remote_code: bool = False
) -> Any:
    """Load the tokenizer of a Hugging Face model folder.

    tokenizer.json decides how texts are split and joined, whatever class tokenizer_config.json
    names. Without it, the folder's own code is used if trust_remote_code is set. Raises UserError
    if there is no tokenizer or one that cannot be relied on, if it encodes or decodes a few texts
    otherwise than tokenizer.json, or if it lacks what training needs: a chat template, which turns
    messages into a prompt, and an end-of-sequence token, which ends a response.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    find_tokenizer(folder)
    settings = _read(folder / "tokenizer_config.json")
    code = _code_of(folder, settings, trusted=trust_remote_code)
    try:
        kind = _class_of(folder, settings) if code is None else import_class(folder, code)
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
        _restore_templates(tokenizer, folder, settings)
        _restore_ends(tokenizer, folder, settings)
    except UserError:
        raise
    except Exception as error:  # the libraries below raise many kinds, Exception itself among them
        reason = str(error).strip().splitlines()[0:1]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file() and not _read(folder / name):
                is_pointer = (folder / name).read_bytes().startswith(b"version https://git-lfs")
                reason = [f"{name} is {'a Git LFS pointer' if is_pointer else 'no JSON object'}"]
        raise UserError(
            f"{folder} holds no tokenizer that can be loaded ({', '.join(reason)}); copy the "
            "tokenizer's files again from the model that its weights come from"
        ) from error
    check_tokenizer(tokenizer, name=str(folder), template=template)
    check_tokenizer_files(tokenizer, folder)
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
    if str(tokenizer.chat_template).startswith("\ufeff"):
        raise UserError(
            f"{name}: the chat template begins with a byte order mark, which would begin every "
            "prompt; save it as UTF-8 without one"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: no eos_token, so a response could never end; name one in "
            "tokenizer_config.json"
        )


def check_raw(tokenizer: Any) -> None:
    """Raise UserError if a text without template would end with the end-of-sequence token."""
    if tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        raise UserError(
            f"the tokenizer adds {tokenizer.eos_token!r} to every text, so with data.template=raw "
            "a response would begin after the end of its prompt; remove it from the "
            "post_processor of tokenizer.json"
        )


def describe_raw(tokenizer: Any, folder: str | Path) -> str | None:
    """Explain whose rule is followed if files disagree on what begins a text without template.

    transformers 4 read these settings for some of its classes, transformers 5 does not.
    """
    wanted = _read(Path(folder) / "tokenizer_config.json").get("add_bos_token")
    adds = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    no_file = not (Path(folder) / "tokenizer.json").is_file()
    if wanted is None or bool(wanted) == adds or tokenizer.bos_token is None or no_file:
        return None
    return (
        f"data.template=raw: tokenizer_config.json has add_bos_token={str(wanted).lower()}, but "
        f"tokenizer.json adds {'' if adds else 'no '}{tokenizer.bos_token!r} to a text, and is "
        "followed; to change it, write the token into the prompts or edit tokenizer.json"
    )


def describe_outside(tokenizer: Any, *, folder: str | Path, vocab_size: int) -> str:
    """Explain why a prompt has a token outside the model's vocabulary."""
    return (
        f"{folder}: its tokenizer has {len(tokenizer):,} tokens, but vocab_size in config.json is "
        f"{vocab_size:,}: they belong to different models; copy the tokenizer's files of the model "
        "that the weights come from"
    )


def _code_of(folder: Path, settings: Mapping[str, Any], *, trusted: bool) -> str | None:
    """Return `module.Class` of the code that a folder without tokenizer.json names, if it does."""
    named = settings.get("auto_map") or {}
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if isinstance(named, list):  # for slow and fast, of which one may be null
        named = next((name for name in reversed(named) if name), None)
    if not named or (folder / "tokenizer.json").is_file():
        return None
    if not trusted:
        raise UserError(
            f"{folder} has no tokenizer.json, and its tokenizer is code of its own ({named}, by "
            "auto_map in tokenizer_config.json); read that code, and set "
            "model.trust_remote_code=true to run it"
        )
    return str(named)


def _class_of(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the class that reads the folder, whose rules for splitting texts are the model's."""
    import transformers

    if (folder / "tokenizer.json").is_file():
        return transformers.PreTrainedTokenizerFast  # not the class named: it has its own rules
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    has_merges = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if has_merges and name in _BYTE_LEVEL:
        return getattr(transformers, name)
    found = sorted({file.name for pattern in _OTHER_FILES for file in folder.glob(pattern)})
    raise UserError(
        f"{folder} has no tokenizer.json, and {', '.join(found) or 'what it has'} alone does not "
        "determine the tokens of a text: add tokenizer.json of the published model, or, if that "
        "has none, its code (tokenization_*.py) and the tokenizer_config.json that names it"
    )


def _restore_templates(tokenizer: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the chat templates that transformers' tokenizers do not read.

    They are in chat_template.json, as of models with images, and in tokenizer_config.json, if
    additional_chat_templates/ has further ones.
    """
    found = tokenizer.chat_template
    if not found:
        tokenizer.chat_template = _read(folder / "chat_template.json").get("chat_template")
    elif isinstance(found, dict) and "default" not in found:
        given = settings.get("chat_template") or {}
        if isinstance(given, list):
            given = {one["name"]: one["template"] for one in given}
        given = {"default": given} if isinstance(given, str) else given
        tokenizer.chat_template = {**given, **found}


def _restore_ends(tokenizer: Any, folder: Path, settings: Mapping[str, Any]) -> None:
    """Set bos_token and eos_token from special_tokens_map.json, if the settings lack the key.

    transformers ignores that file if the settings have added_tokens_decoder, and a template that
    begins with bos_token would then begin without.
    """
    named = _read(folder / "special_tokens_map.json")
    for key in ("bos_token", "eos_token"):
        token = named.get(key)
        if token and key not in settings:
            setattr(tokenizer, key, token["content"] if isinstance(token, dict) else token)


def _read(file: Path) -> dict[str, Any]:
    """A JSON object of the folder; empty where it is none: AutoTokenizer complains."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
