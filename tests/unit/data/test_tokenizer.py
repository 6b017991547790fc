"""Tokenizers of model folders: which class reads one, and what a raw prompt becomes."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.rows import count_rows
from megatron_rl.data.tokenizer import load_tokenizer
from tests.unit.data.test_prompts import build_row, build_tokenizer, write
from tests.unit.tools.test_make_tiny_task import tiny

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def save(folder, *, config, tokenizer_class):
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": tokenizer_class}))


@pytest.mark.parametrize(
    ("config", "tokenizer_class"),
    [(LLAMA, "PreTrainedTokenizerFast"), (LLAMA, "TokenizersBackend"),
     (QWEN, "PreTrainedTokenizerFast")],
)  # fmt: skip
def test_class_equals_auto_tokenizer(tmp_path, config, tokenizer_class):
    save(tmp_path, config=config, tokenizer_class=tokenizer_class)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)


def test_class_of_model_saved_by_transformers(tmp_path):
    tiny.build_tokenizer(128).save_pretrained(tmp_path)
    for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": kind}))
        ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        assert type(ours) is type(theirs)
        text = "Work out 4 + 2 modulo 10."
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]


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


def test_command_checks_run_without_torch():
    """Its import alone takes longer than all checks."""
    code = (
        "import sys; sys.modules['torch'] = None; import megatron_rl.preflight.start; "
        "from transformers import Qwen2Tokenizer; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
