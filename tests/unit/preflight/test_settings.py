"""Tests of the checks of settings against the model's config.json."""

import json
import resource

import pytest

from megatron_rl.config import ConfigError, apply_override, parse_config
from megatron_rl.preflight.settings import check_settings

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "eos_token_id": 2, "rope_theta": 1000.0, "rms_norm_eps": 1e-6,
    "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "norm_topk_prob": True, "head_dim": 8,
}  # fmt: skip


def check(folder, sizes, processes, given=""):
    """Run `check_settings` for a model of these sizes and 4 prompts x 2 responses."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(SIZES | sizes))
    (folder / "model" / "tokenizer.json").touch()
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "reward_model": {"ground_truth": 2}}')
    values = {
        "run": {"dir": str(folder), "name": "a"},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 4, "responses_per_prompt": 2, "max_response_tokens": 16},
        "trainer": {"minibatches": 1},
    }
    for override in filter(None, given.split(" & ")):
        apply_override(values, override)
    return check_settings(parse_config(values), world_size=processes)


def test_check_settings_names_limit_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (180, 514))  # 3 sockets and 512 others
    with pytest.raises(ConfigError) as error:
        check(tmp_path, {}, 4)
    assert "each of the 4 processes needs up to" in str(error.value)
    assert "the hard limit here is 514 (ulimit -Hn); raise it" in str(error.value)


def test_check_settings_suggests_sizes_that_divide_everything(tmp_path):
    """12 attention heads and 90 units: 1, 2, 3, 6; 4 key-value heads allow 1 and 2 of them."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
    with pytest.raises(ConfigError) as error:
        check(tmp_path, sizes, 8, "parallel.tensor=8")
    hints = [line.split("; ")[1] for line in str(error.value).splitlines() if "not divide" in line]
    assert hints == ["choose from 1, 2"] * 2
    with pytest.raises(ConfigError, match=r"tensor=6 neither .* 4 key-value heads .* from 1, 2$"):
        check(tmp_path / "six", sizes, 6, "parallel.tensor=6")


def test_check_settings_lets_two_ranks_share_a_key_value_head(tmp_path):
    with pytest.raises(ConfigError) as error:
        check(tmp_path, {}, 4, "parallel.tensor=4 & rollout.tensor=4")
    assert "parallel.tensor=4 does not divide the model's 90 feed-forward units" in str(error.value)
    assert "key-value" not in str(error.value)
