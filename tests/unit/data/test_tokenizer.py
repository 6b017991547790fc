"""Tokenizers of model folders: whose tokens they give, and what a raw prompt becomes."""

import json
import re
import subprocess
import sys
from functools import partial

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.rendering import tokenize_messages
from megatron_rl.data.rows import count_rows
from megatron_rl.data.tokenizer import (
    check_same_tokens,
    check_tokenizer_files,
    describe_other_reader,
    describe_raw,
    load_tokenizer,
)
from megatron_rl.errors import UserError
from tests.unit.data.test_prompts import build_row, build_tokenizer, write
from tests.unit.data.tokenizer_folders import (
    BOS,
    EOS,
    TEMPLATE,
    TURN,
    byte_level,
    metaspace,
    write_folder,
    write_tekken,
    write_tiktoken,
)

# Families of docs/models.md: form, model_type and the classes that published folders name.
FAMILIES = [
    ("bytes", "qwen2", "Qwen2Tokenizer"), ("bytes", "qwen3_moe", "Qwen2Tokenizer"),
    ("bytes, BOS", "llama", "PreTrainedTokenizerFast"), ("bytes", "llama", "LlamaTokenizerFast"),
    ("bytes", "llama", "GPT2Tokenizer"),
    ("prefix", "llama", "LlamaTokenizer"), ("prefix", "mistral", "LlamaTokenizer"),
    ("bytes, BOS", "mistral", "PreTrainedTokenizerFast"),
    ("no prefix", "gemma3_text", "GemmaTokenizer"), ("bytes", "gpt_oss", "PreTrainedTokenizerFast"),
    ("bytes", "glm4_moe", "PreTrainedTokenizerFast"),
    ("bytes", "deepseek_v3", "LlamaTokenizerFast"),
    ("bytes", "llama", "TokenizersBackend"), ("bytes", "qwen2", None),
]  # fmt: skip
FORMS = {
    "bytes": byte_level, "bytes, BOS": partial(byte_level, adds_bos=True),
    "prefix": partial(metaspace, prefix=True), "no prefix": partial(metaspace, prefix=False),
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello world, how are you?"}]


@pytest.mark.parametrize(("form", "model_type", "name"), FAMILIES)
def test_tokens_are_those_of_tokenizer_json(tmp_path, form, model_type, name):
    # add_bos_token: read by transformers 4 for some classes, and no part of tokenizer.json
    write_folder(
        tmp_path, FORMS[form](), model_type=model_type, tokenizer_class=name,
        add_bos_token="BOS" not in form, add_prefix_space=True, legacy=True,
        clean_up_tokenization_spaces=True,
    )  # fmt: skip
    if model_type == "mistral":
        write_tekken(tmp_path)
    loaded, file = load_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "hello world , how are you?  don't\n\t1234 Größe 😀"
    for whole in (False, True):
        ids = file.encode(text, add_special_tokens=whole).ids
        assert loaded(text, add_special_tokens=whole)["input_ids"] == ids
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert (loaded.bos_token, loaded.eos_token) == (BOS, EOS)
    assert loaded.eos_token_id == file.token_to_id(EOS)
    assert loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == (
        f"{BOS}{TURN}{MESSAGES[0]['content']}{TURN}"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template": "\ufeff" + TEMPLATE}, "begins with a byte order mark"),
        ({"split_special_tokens": True}, r"encodes '<\|begin\|> a"),
        (
            {"added_tokens_decoder": {"302": {"content": TURN, "rstrip": True, "special": True}}},
            r"encodes '<\|turn\|> a .*\[.*\], but tokenizer.json to \[",
        ),
        (
            {"added_tokens_decoder": {"303": {"content": "zebra", "special": True}}},
            r"encodes 'zebra a zebra.*' to \[303, .*correct what changes them in",
        ),
    ],
)
def test_settings_that_contradict_tokenizer_json_are_refused(tmp_path, changes, message):
    write_folder(tmp_path, byte_level(), model_type="llama", **changes)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": ', r"\(tokenizer.json is no JSON object\)"),
        ("version https://git-lfs.github.com/spec/v1", r"\(tokenizer.json is a Git LFS pointer\)"),
    ],
)
def test_file_that_is_no_json_is_named(tmp_path, text, message):
    write_folder(tmp_path, byte_level(), model_type="llama")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_probe_compares_class_of_transformers_with_tokenizer_json(tmp_path):
    """The class that transformers 5 chooses itself: it loses the spaces."""
    settings = {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"}
    write_folder(tmp_path, byte_level(), **settings)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="LlamaTokenizer encodes 'Hello world, how are you"):
        check_tokenizer_files(theirs, tmp_path)


def test_settings_that_change_no_token_are_accepted(tmp_path):
    """Padding is unused, and transformers cuts and pads only if it is asked to."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    write_folder(tmp_path, tokenizer, model_type="llama", pad_token="[PAD]", model_max_length=8)
    text = "hello world, how are you?"
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}], {}),
        (None, {"chat_template.jinja": TEMPLATE}),
        ("old", {"chat_template.jinja": TEMPLATE}),
        (None, {"chat_template.json": json.dumps({"chat_template": TEMPLATE})}),
        (TEMPLATE, {"additional_chat_templates/tool_use.jinja": "x"}),
        (None, {"chat_template.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": "x"}),
    ],
)
def test_chat_template_is_read_from_every_published_place(tmp_path, given, files):
    write_folder(tmp_path, byte_level(), model_type="llama", chat_template=given)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    text = load_tokenizer(tmp_path).apply_chat_template(MESSAGES, tokenize=False)
    assert text == f"{BOS}{TURN}{MESSAGES[0]['content']}"


@pytest.mark.parametrize("as_text", [True, False])
def test_ends_are_read_from_special_tokens_map(tmp_path, as_text):
    write_folder(
        tmp_path, byte_level(), model_type="llama", bos_token=None, eos_token=None,
        added_tokens_decoder={},
    )  # fmt: skip
    named = {"bos_token": BOS, "eos_token": EOS}
    if not as_text:
        named = {key: {"content": token, "rstrip": False} for key, token in named.items()}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_token, loaded.eos_token_id) == (EOS, 301)
    assert loaded.apply_chat_template(MESSAGES, tokenize=False).startswith(BOS)


def test_code_of_folder_runs_only_if_it_is_trusted(tmp_path):
    write_tiktoken(tmp_path)
    with pytest.raises(UserError, match=r"tokenization_moonshot.* set\s+model.trust_remote_code"):
        load_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == "TikTokenTokenizer"
    # 256: don't is whole, which a generic pattern would split; 257: BOS; 259: the turn
    assert loaded("a don't")["input_ids"] == [ord("a"), ord(" "), 256]
    prompt = tokenize_messages([{"role": "user", "content": "don't"}], loaded, arguments={})
    assert prompt == [257, 259, 256, 259]
    assert loaded.decode([257, 259, 256, 258], skip_special_tokens=True) == "don't"
    assert loaded.eos_token_id == 258
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("|.", "|\\S"), r"encodes 'Hello world.*decodes to 'Helloworld"),
        (lambda text: "import nothing_of_this_name", "cannot be imported .*nothing_of_this_name"),
        (lambda text: text.replace('"replace"', '"replace").lower('), r"decodes to 'hello"),
    ],
)
def test_code_that_loses_text_is_refused(tmp_path, change, message):
    write_tiktoken(tmp_path)
    file = tmp_path / "tokenization_moonshot.py"
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        ({"auto_map": None}, ["tiktoken.model"], "tiktoken.model alone does not determine"),
        ({"auto_map": {"AutoTokenizer": ["some/model--code.Kind", None]}}, [], "not in the folder"),
        ({"auto_map": None}, ["tokenizer.model.v3"], "tokenizer.model.v3 alone"),
        ({"auto_map": None}, ["vocab.json", "merges.txt"], "merges.txt, vocab.json alone"),
        ({"auto_map": None}, [], "what it has alone does not"),
    ],
)
def test_files_that_do_not_determine_tokens_are_refused(tmp_path, settings, files, message):
    write_tiktoken(tmp_path, **settings)
    (tmp_path / "tiktoken.model").unlink()
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path, trust_remote_code=True)


def test_vocabulary_and_merges_of_qwen_are_read(tmp_path):
    """As transformers 4 saved its slow tokenizers."""
    saved = json.loads(byte_level().to_str())
    added = {str(token["id"]): {"content": token["content"], "special": True}
             for token in saved["added_tokens"]}  # fmt: skip
    write_folder(
        tmp_path, None, model_type="qwen2", tokenizer_class="Qwen2Tokenizer",
        added_tokens_decoder=added,
    )  # fmt: skip
    (tmp_path / "vocab.json").write_text(json.dumps(saved["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in saved["model"]["merges"])
    (tmp_path / "merges.txt").write_text(merges)
    loaded, text = load_tokenizer(tmp_path), "hello  world,\n don't 😀"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded(TURN)["input_ids"] == [int(list(added)[2])]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["900"] = settings["added_tokens_decoder"].pop("302")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"the token '<\|turn\|>' to \[302\], but its id is 900"):
        load_tokenizer(tmp_path)


def test_raw_prompt_is_text_with_what_tokenizer_adds(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer(template=None)
    path = write(tmp_path / "set.parquet", [build_row("ab")])
    (prompt,) = load_prompts(path, tokenizer, max_prompt_tokens=5, template="raw")
    assert prompt.token_ids == (1, 2)  # a b of "<ab>=!?"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="< $A", special_tokens=[("<", 0)]
    )
    (prompt,) = load_prompts(path, tokenizer, max_prompt_tokens=5, template="raw")
    assert prompt.token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("form", "settings", "note"),
    [
        ("bytes", {"add_bos_token": True}, rf"add_bos_token=true, but .* adds no {BOS!r} to"),
        ("bytes, BOS", {"add_bos_token": False}, rf"add_bos_token=false, but .* adds {BOS!r} to"),
        ("bytes, BOS", {"add_bos_token": True, "add_eos_token": False}, None),
        ("bytes", {"add_bos_token": False}, None), ("bytes, BOS", {}, None),
    ],
)  # fmt: skip
def test_raw_prompt_follows_tokenizer_json_where_settings_differ(tmp_path, form, settings, note):
    write_folder(tmp_path, FORMS[form](), model_type="llama", **settings)
    found = describe_raw(load_tokenizer(tmp_path, template="raw"), tmp_path)
    assert found is None if note is None else re.search(note.replace("|", r"\|"), str(found))


def test_raw_prompt_that_ends_with_end_of_text_is_refused(tmp_path):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    write_folder(tmp_path, tokenizer, model_type="llama")
    path = write(tmp_path / "set.parquet", [build_row("ab")])
    loaded = load_tokenizer(tmp_path)
    assert load_prompts(path, loaded, max_prompt_tokens=9)[0].token_ids[-1] != loaded.eos_token_id
    with pytest.raises(UserError, match="after the end of its prompt"):
        load_prompts(path, loaded, max_prompt_tokens=9, template="raw")


def test_raw_messages_are_joined_by_blank_lines_without_roles(tmp_path):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "set.parquet", [build_row() | {"prompt": messages}])
    tokenizer = build_tokenizer(template=None)
    (prompt,) = load_prompts(path, tokenizer, max_prompt_tokens=9, template="raw")
    assert prompt.token_ids == (1, 6, 2)  # a, the blank line as one unknown piece, b


def test_rows_are_counted_without_reading_them(tmp_path):
    assert count_rows(write(tmp_path / "a.parquet", [build_row()] * 7)) == 7
    (tmp_path / "a.jsonl").write_text("{}\n\n{}\n")
    assert count_rows(tmp_path / "a.jsonl") == 2
    assert count_rows("hf:someone/something") == float("inf")


@pytest.mark.slow
def test_command_checks_run_without_torch():
    """Its import alone takes longer than all checks."""
    code = (
        "import sys; sys.modules['torch'] = None; import megatron_rl.preflight.start; "
        "from transformers import PreTrainedTokenizerFast; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokens_of_teacher_and_student_are_compared(tmp_path):
    stored = {
        "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        "added_tokens": [{"id": 3, "content": "<|end|>", "special": True}],
        "post_processor": None,
    }

    def save(name, **changes):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(stored | changes))
        return tmp_path / name

    student = save("student")
    # As other releases write the same tokens: merges as pairs, other settings.
    pairs = stored["model"] | {"merges": [["a", "b"]]}
    check_same_tokens(student, save("pairs", model=pairs, post_processor={"type": "Sequence"}))
    others = {
        "vocabulary": {"model": {**stored["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}},
        "merges": {"model": {**stored["model"], "merges": []}},
        "added tokens": {"added_tokens": []},
    }
    for part, changes in others.items():
        with pytest.raises(UserError, match=rf"has other tokens than .*differ in {part}\)"):
            check_same_tokens(student, save(part, **changes))


def test_files_are_compared_where_a_teacher_has_no_tokenizer_json(tmp_path):
    for name, content in (("one", "a"), ("same", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiktoken.model").write_text(content)
    check_same_tokens(tmp_path / "one", tmp_path / "same")
    with pytest.raises(UserError, match=r"differ in tiktoken.model"):
        check_same_tokens(tmp_path / "one", tmp_path / "other")


def test_folder_that_another_class_reads_otherwise_is_named(tmp_path):
    """transformers takes qwen2's class, of bytes, for pieces that begin with a mark of a space."""
    write_folder(
        tmp_path, metaspace(prefix=True), model_type="qwen2", tokenizer_class="TokenizersBackend"
    )
    note = describe_other_reader(tmp_path)
    assert note is not None and f"AutoTokenizer does not read {tmp_path} as it is trained" in note
    assert note.endswith("load the tokenizer by transformers.PreTrainedTokenizerFast")
    write_folder(
        tmp_path, metaspace(prefix=True), model_type="llama", tokenizer_class="TokenizersBackend"
    )
    assert describe_other_reader(tmp_path) is None
    (tmp_path / "tokenizer.json").unlink()  # it would need the folder's own code
    assert describe_other_reader(tmp_path) is None
