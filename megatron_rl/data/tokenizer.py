"""Load the tokenizer of a model folder and check that training can use it.

transformers chooses a class for a folder, and a class may replace the rules by which tokenizer.json
splits and joins texts (https://github.com/huggingface/transformers/issues/45488), so the loaded
tokenizer is compared with the folder's tokenizer.json on a few texts.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from megatron_rl.errors import UserError


def import_class(folder: Path, name: str) -> Any:
    """Import `module.Class` from a model folder, as a package of its own.

    Nothing is copied to a cache, unlike by transformers: ranks that start at the same time cannot
    read half of a file. Raises UserError if the class cannot be imported.
    """
    module, _, kind = name.rpartition(".")
    if "--" in name or not (folder / f"{module.replace('.', '/')}.py").is_file():
        raise UserError(
            f"{folder}: auto_map in tokenizer_config.json names {name}, which is not in the "
            f"folder; copy {module.rpartition('--')[2]}.py of the published model into it, and "
            "name it without a repository"
        )
    _provide_old_names()
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    package = f"tokenizer_code_{digest}"
    if package not in sys.modules:  # relative imports of the code need one
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder.resolve())]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the folder stays as it is
    try:
        return getattr(importlib.import_module(f"{package}.{module}"), kind)
    except Exception as error:  # code of others
        raise UserError(
            f"{folder}: the tokenizer's code {name} cannot be imported ({error}); install what it "
            "needs, or take its version for the installed transformers"
        ) from error
    finally:
        sys.dont_write_bytecode = writes


def _provide_old_names() -> None:
    """Provide a name that the published tokenizers of Moonlight and Kimi import.

    transformers 5 has it in another module.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.gpt2 import tokenization_gpt2

    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        tokenization_gpt2.bytes_to_unicode = bytes_to_unicode


TEXTS = (
    "Hello world, how are you?",
    " a leading space, and a trailing one ",
    "two  spaces,   three,\ttabs\t\tand\n\nempty lines\r\n  indented\n",
    "I don't, we've, they'LL; it's 'quoted' , with spaces before . commas !",
    "1 22 333 4444 55555, 3.14159, 1,000,000, -7, 2^10, x_1",
    "def f(x: int) -> str:\n    return f\"{x!r}\\n\"  # {'a': [1, 2]}\n",
    "$$\\frac{1}{2} \\le \\sqrt{x}$$ and \\boxed{42}",
    "Größe, déjà vu, Привет мир, Γειά σου, مرحبا بالعالم, שלום, नमस्ते, สวัสดี, 안녕 하세요",  # noqa: RUF001
    "你好，世界！今天是２０２５年。 こんにちは世界 𝒙²",  # noqa: RUF001
    "😀 👩‍👩‍👧 🇩🇪 ∀x∈ℕ ½ “quotes” … — €5",  # noqa: RUF001
)


def check_tokenizer_files(tokenizer: Any, folder: Path) -> None:
    """Raise UserError if the tokenizer encodes or decodes otherwise than its folder's files.

    The reference is tokenizer.json, read by the library `tokenizers`. Without that file every text
    must be what its tokens decode to, and every added token one token with the id that
    tokenizer_config.json gives it.
    """
    file = folder / "tokenizer.json"
    problems = _differences(tokenizer, file) if file.is_file() else _losses(tokenizer)
    if problem := next(problems, None):
        cure = _CURE if file.is_file() else ""
        raise UserError(f"{folder}: {problem}{cure}")


_CURE = (
    "; the policy would get other tokens than those it was trained with: correct what changes them "
    "in tokenizer_config.json (added_tokens_decoder, split_special_tokens, ...), or copy "
    "tokenizer.json and tokenizer_config.json again from the published model"
)


def describe_other_reader(folder: str | Path) -> str | None:
    """Explain that AutoTokenizer reads a folder otherwise than `load_tokenizer`; None if it agrees.

    Its class for the model's type may replace the rules of tokenizer.json.
    """
    from transformers import AutoTokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        other = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        problem = next(_differences(other, file), None)
    except Exception as error:  # noqa: BLE001 - the libraries raise many kinds
        problem = f"AutoTokenizer cannot read it ({(str(error).splitlines() or [''])[0]})"
    if problem is None:
        return None
    return (
        f"AutoTokenizer does not read {folder} as it is trained: "
        f"{shorten(problem, 200, placeholder=' ...')}; programs that use it "
        "give the model other tokens: load the tokenizer by transformers.PreTrainedTokenizerFast"
    )


def _differences(tokenizer: Any, file: Path) -> Iterator[str]:
    """Yield how the tokenizer differs from tokenizer.json."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(file))
    reference.no_truncation()  # as transformers does, unless it is asked to cut or pad
    reference.no_padding()
    name = type(tokenizer).__name__
    tokens = _tokens_to_compare(tokenizer, reference)
    for text in (*TEXTS, *(f"{token} a {token}\n{token}b" for token in tokens)):
        for whole in (False, True):  # with what the tokenizer adds to a text, such as BOS
            theirs = reference.encode(text, add_special_tokens=whole).ids
            ours = tokenizer(text, add_special_tokens=whole)["input_ids"]
            if ours != theirs:
                yield f"{name} encodes {text!r} to {ours}, but tokenizer.json to {theirs}"
        for skip in (False, True):
            expected = reference.decode(theirs, skip_special_tokens=skip)
            found = tokenizer.decode(theirs, skip_special_tokens=skip)
            if found != expected:
                yield f"{name} decodes {theirs} to {found!r}, but tokenizer.json to {expected!r}"


def _tokens_to_compare(tokenizer: Any, reference: Any) -> list[str]:
    """Return the added tokens that are in the chat template, or not the same in both tokenizers."""
    theirs = reference.get_added_tokens_decoder()
    ours = tokenizer.added_tokens_decoder
    added = {token.content for token in theirs.values()}
    used = {token for token in added if token in str(tokenizer.chat_template)}
    changed = {
        token.content
        for number, token in (*ours.items(), *theirs.items())
        if repr(ours.get(number)) != repr(theirs.get(number))
    }
    named = added.intersection(tokenizer.all_special_tokens)
    # padding and unknown tokens are no part of a prompt, and may be missing in tokenizer.json
    return sorted((used | changed | named) - {tokenizer.pad_token, tokenizer.unk_token})


def _losses(tokenizer: Any) -> Iterator[str]:
    """Yield what a tokenizer without tokenizer.json loses."""
    name = type(tokenizer).__name__
    cure = "; copy the tokenizer's files again from the published model, if it has one with "
    cure += "tokenizer.json"
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = tokenizer.decode(ids, skip_special_tokens=False)
        if found != text:
            yield f"{name} encodes {text!r} to {ids}, which it decodes to {found!r}{cure}"
    declared = tokenizer.init_kwargs.get("added_tokens_decoder") or {}
    numbers = {str(token): int(number) for number, token in declared.items()}
    for token, number in {**_added_tokens(tokenizer), **numbers}.items():
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if ids != [number]:
            yield f"{name} encodes the token {token!r} to {ids}, but its id is {number}{cure}"


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are not split, such as those of the chat template."""
    named = {
        token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens
    }
    return {**named, **tokenizer.get_added_vocab()}


Template = Literal["chat", "raw"]

# Classes of transformers that split texts for vocab.json and merges.txt as their models need it.
_BYTE_LEVEL = ("Qwen2Tokenizer", "GPT2Tokenizer")
# Files of tokenizers, which say nothing about how a text is split before its pieces are joined.
_OTHER_FILES = ("*.model", "*.model.*", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt")


def require_tokenizer(folder: str | Path) -> None:
    """Raise ValueError if a folder has no tokenizer: transformers would make up an empty one."""
    if not any(list(Path(folder).glob(name)) for name in ("tokenizer*", "vocab*", "*.model")):
        raise UserError(
            f"{folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, ...); copy "
            "the tokenizer's files of the model that its weights come from"
        )


def check_same_tokens(folder: str | Path, other: str | Path) -> None:
    """Raise UserError unless two folders' tokenizers give the same ids to the same tokens.

    Compares vocabulary, merges and added tokens of tokenizer.json, or else the files that tokens
    are in; templates and other settings may differ.
    """
    if (mine := _tokens_of(Path(folder))) == (theirs := _tokens_of(Path(other))):
        return
    parts = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    raise UserError(
        f"{other} has other tokens than {folder} (they differ in {', '.join(sorted(parts))}); a "
        "reference scores the policy's token ids, so give a model with the same tokenizer"
    )


def _tokens_of(folder: Path) -> dict[str, Any]:
    """Return what decides the ids of a folder's tokens, by the name of its part."""
    if not (folder / "tokenizer.json").is_file():
        files = sorted(file for name in _OTHER_FILES for file in folder.glob(name))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    stored = _read(folder / "tokenizer.json")
    model = stored.get("model") or {}
    merges = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or []]
    added = {token["content"]: token["id"] for token in stored.get("added_tokens") or []}
    return {"vocabulary": model.get("vocab"), "merges": merges, "added tokens": added}


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
    require_tokenizer(folder)
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


def check_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that no chat template of the tokenizer has the name of.

    arguments: `data.template_arguments`, with what the run itself adds.
    """
    found = tokenizer.chat_template
    templates = found if isinstance(found, dict) else {"default": str(found or "")}
    chosen = arguments.get("chat_template")
    if isinstance(chosen, str) and "{" not in chosen and chosen not in templates:
        raise UserError(
            f"data.template_arguments: chat_template={chosen!r} is none of the model's templates, "
            f"{', '.join(templates)}; correct it"
        )
    source = "\n".join([*map(str, templates.values()), str(chosen or "")])
    for name in arguments.keys() - {"chat_template", "tools", "strftime_now"}:
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise UserError(
                f"data.template_arguments: the chat template does not read {name}, so it would "
                "have no effect; correct its name, or remove it"
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
