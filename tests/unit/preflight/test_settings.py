"""Tests of the checks of settings against the model's config.json."""

import json
import resource

import pytest

from megatron_rl.config import ConfigError, parse_config
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


def check(folder, sizes, *, world_size, **sections):
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
    for name, settings in sections.items():
        values[name] = values.get(name, {}) | settings
    return check_settings(parse_config(values), world_size=world_size)


def test_check_settings_shards_experts_by_their_own_size(tmp_path):
    # 4 does not divide the 90 units of a dense layer (the model has none) but the 20 of an expert.
    layout = {"parallel": {"tensor": 2}, "rollout": {"tensor": 1}}
    assert check(tmp_path / "a", EXPERTS, world_size=2, **layout).experts is not None
    four = {"parallel": {"tensor": 4}, "rollout": {"tensor": 4}}
    kv = {"num_key_value_heads": 4}
    assert check(tmp_path / "b", EXPERTS | kv, world_size=4, **four)
    with pytest.raises(ConfigError) as error:
        check(tmp_path / "c", {}, world_size=4, **four)
    assert "key-value" not in str(error.value)  # two ranks share a head
    assert "parallel.tensor=4 does not divide the model's 90 feed-forward units" in str(error.value)
    with pytest.raises(
        ConfigError, match=r"parallel.expert=4 .* model's 6 experts; choose from 1, 2, 3, 6$"
    ):
        check(tmp_path / "d", EXPERTS, world_size=4, parallel={"expert": 4})


def test_check_settings_names_limit_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (180, 514))  # 3 sockets and 512 others
    with pytest.raises(ConfigError) as error:
        check(tmp_path, {}, world_size=4)
    assert "each of the 4 processes needs up to" in str(error.value)
    assert "the hard limit here is 514 (ulimit -Hn); raise it" in str(error.value)


def test_check_settings_suggests_sizes_that_divide_everything(tmp_path):
    """12 attention heads and 90 units: 1, 2, 3, 6; 4 key-value heads allow 1 and 2 of them."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
    with pytest.raises(ConfigError) as error:
        check(tmp_path, sizes, world_size=8, parallel={"tensor": 8})
    hints = [line.split("; ")[1] for line in str(error.value).splitlines() if "not divide" in line]
    assert hints == ["choose from 1, 2"] * 2
    with pytest.raises(ConfigError, match=r"tensor=6 neither .* 4 key-value heads .* from 1, 2$"):
        check(tmp_path / "six", sizes, world_size=6, parallel={"tensor": 6})


def test_check_settings_refuses_expert_tensor_sizes_that_megatron_lacks(tmp_path):
    for name, parallel, output in (
        (
            "odd",
            {"tensor": 2, "expert": 2, "expert_tensor": 5},
            "does not divide parallel.tensor=2",
        ),
        ("one", {"tensor": 2, "expert_tensor": 1}, "is below parallel.tensor=2, which needs"),
    ):
        with pytest.raises(ConfigError, match=f"parallel.expert_tensor=. {output}"):
            check(tmp_path / name, EXPERTS, world_size=20, parallel=parallel)
    parallel = {"tensor": 2, "expert": 2}
    assert check(tmp_path / "whole", EXPERTS, world_size=2, parallel=parallel)


def test_check_settings_refuses_what_megatron_and_vllm_lack_for_gpt_oss(tmp_path):
    sizes = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "head_dim": 64,
             "num_experts_per_tok": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5,
             "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
    whole = {"tensor": 2, "expert": 2, "expert_tensor": 1}
    for name, sections, output in (
        ("slices", {"parallel": {"tensor": 2}}, "expert_tensor=2 does not divide .* 1 expert with"),
        ("heads", {"parallel": whole, "rollout": {"tensor": 4}},
         "rollout.tensor=4: vLLM does not copy the 2 key-value heads of GptOss.* to 4 ranks; at m"),
        ("te", {"parallel": whole, "model": {"transformer_engine": True}},
         "attention sinks and experts with a clamped activation, which Transformer Engine's"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=output):
            check(tmp_path / name, sizes, world_size=4, **sections)
    fits = {"parallel": whole, "rollout": {"tensor": 2}}
    assert check(tmp_path / "fits", sizes, world_size=4, **fits)


def test_check_settings_refuses_layouts_of_experts_with_adapters(tmp_path):
    sizes = EXPERTS | {"num_key_value_heads": 4}
    rate = {"learning_rate": 1e-4}
    for name, targets, parallel, output in (
        ("slices", ["qkv"], {"tensor": 4, "expert": 2, "expert_tensor": 2}, "expert_tensor=2 can"),
        ("only", ["fc1"], {"expert": 2}, r"lora.targets=\['fc1'\] are in experts only"),
    ):
        layout = {"parallel": parallel, "optimizer": rate, "lora": {"targets": targets}}
        with pytest.raises(ConfigError, match=output):
            check(tmp_path / name, sizes, world_size=4, **layout)
    layout = {"parallel": {"tensor": 2, "expert": 2}, "optimizer": rate, "lora": {"rank": 8}}
    assert check(tmp_path / "both", sizes, world_size=4, **layout)


def test_check_settings_refuses_adapters_that_vllm_lacks(tmp_path):
    rate, lora = {"learning_rate": 1e-4}, {"push": "adapters", "targets": ["qkv"]}
    for name, sizes, changes, output in (
        ("experts", EXPERTS, {}, "lora.push=adapters: the model has experts, which vLLM"),
        ("rank", {}, {"rank": 513}, "lora.rank=513 is above 512, vLLM's largest with lora.push"),
    ):
        with pytest.raises(ConfigError, match=output):
            check(tmp_path / name, sizes, world_size=1, optimizer=rate, lora=lora | changes)
    assert check(tmp_path / "fits", {}, world_size=1, optimizer=rate, lora=lora | {"rank": 512})


def test_check_settings_replays_routes_of_experts_only(tmp_path):
    model = {"routing_replay": "behavior"}
    with pytest.raises(ConfigError, match=r"model.routing_replay=behavior: .* has no experts"):
        check(tmp_path / "dense", {}, world_size=1, model=model)
    assert check(tmp_path / "experts", EXPERTS, world_size=1, model=model)


def test_check_settings_names_rule_of_stage_layers(tmp_path):
    parallel = {"pipeline": 2, "stage_layers": [1, 2]}
    with pytest.raises(
        ConfigError, match=r"parallel.stage_layers=\[1, 2\] must .* sum of 2, or be"
    ):
        check(tmp_path / "sum", {}, world_size=2, parallel=parallel)
    sizes = {"num_hidden_layers": 3}
    assert check(tmp_path / "three", sizes, world_size=2, parallel=parallel)
    assert check(tmp_path / "even", sizes, world_size=2, parallel={"pipeline": 2})


def test_check_settings_oapl_needs_optimal_value_estimator(tmp_path):
    objective, estimator = {"name": "oapl", "beta": 0.1}, {"estimator": "optimal_value"}
    assert check(
        tmp_path / "a", {}, world_size=1, objective=objective, advantage=estimator | {"beta": 0.5}
    )
    with pytest.raises(ConfigError, match=r"set advantage.estimator=optimal_value"):
        check(tmp_path / "b", {}, world_size=1, objective=objective)


def test_check_settings_engine_may_repeat_key_value_heads(tmp_path):
    # Each of the 2 key-value heads is repeated on 4 of 8 engine ranks; 88 = 8 * 11.
    sizes = {"intermediate_size": 88}
    assert check(tmp_path / "a", sizes, world_size=8, rollout={"tensor": 8})
    with pytest.raises(ConfigError, match=r"rollout.tensor=3: .* do not fit"):
        check(tmp_path / "b", {}, world_size=3, rollout={"tensor": 3})
    with pytest.raises(ConfigError, match=r"rollout.tensor=2: .* does not divide the 3 ranks"):
        check(tmp_path / "c", {}, world_size=3, rollout={"tensor": 2})
