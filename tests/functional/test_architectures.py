"""Every architecture against transformers and vLLM: one weight sync, then equal log-probs.

The shards are cut from transformers' own tensors, so this needs no Megatron.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.types import Prompt, SamplingSettings
from tests.published_form import load_model, publish
from tests.ranks import run_ranks
from tests.unit.data.tokenizer_folders import byte_level, write_folder

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False,
        "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
GPT_OSS = {
    "head_dim": 64,
    "sliding_window": 5,
    "intermediate_size": 128,  # vLLM's kernel divides it into 32s on each rank
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN,
}
# The second layer attends to all tokens, up to 30, with other frequencies.
GEMMA3 = {
    "num_hidden_layers": 3,
    "head_dim": 64,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 100,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
# On a CPU vLLM has a kernel for latents of this size alone.
LATENT = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "kv_lora_rank": 512, "qk_nope_head_dim": 40, "qk_rope_head_dim": 64, "head_dim": 64,
    "v_head_dim": 48, "num_key_value_heads": 4, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
HYBRID = {
    "head_dim": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "layer_types": [
        "linear_attention", "full_attention", "linear_attention",
    ],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
SEQUENCES = [[3, 5, 7, 11, 13], list(range(40, 70)), [299, 298, 1]]


def _save_model(name: str, folder: Path) -> None:
    """Create a small random model of one architecture."""
    import transformers

    sizes = {
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    if name.startswith(("Qwen3", "Glm4")):
        sizes["head_dim"] = 64  # not hidden size / heads
    if name == "Mistral":
        sizes |= {"head_dim": 64, "sliding_window": 5}  # the longest sequence has 30 tokens
    if name in ("Qwen2Moe", "Qwen3Moe"):
        sizes |= EXPERTS | {"norm_topk_prob": name == "Qwen3Moe"}
    if name.startswith("Deepseek"):
        sizes |= GROUPED | LATENT | {"q_lora_rank": 48 if name == "DeepseekV3" else None}
    if name == "Glm4Moe":
        sizes |= GROUPED | {"use_qk_norm": True, "attention_bias": True}
    if name.startswith(("Qwen3Next", "Qwen3_5")):
        sizes |= HYBRID
    if name.startswith(("Qwen3Next", "Qwen3_5Moe")):
        sizes |= EXPERTS | {"shared_expert_intermediate_size": 192}
    if name == "Qwen2Moe":
        sizes["shared_expert_intermediate_size"] = 192
    sizes |= {"Gemma3": GEMMA3, "GptOss": GPT_OSS}.get(name, {})
    name, _, form = name.partition(" ")
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_class(**sizes, architectures=[f"{name}ForCausalLM"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Larger biases would make attention nearly independent of its tokens.
            is_scale = parameter.dim() == 1 and "bias" not in parameter_name
            parameter.copy_(1 + 0.3 * noise if is_scale else 0.1 * noise)
            if parameter_name.endswith("A_log"):  # states last for dozens of tokens
                parameter.copy_(noise - 3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if form == "published":
        publish(folder)
    if name == "Llama":  # a class with which transformers would lose the spaces
        tokenizer = byte_level(pieces=sizes["vocab_size"] - 3)
        settings = json.loads((folder / "config.json").read_text())
        write_folder(folder, tokenizer, model_type="llama", tokenizer_class="LlamaTokenizerFast")
        (folder / "config.json").write_text(json.dumps(settings))
    if name == "Mistral":  # a download has the weights and sizes in Mistral's own format, too
        (folder / "consolidated.safetensors").touch()
        (folder / "params.json").write_text("{}")


@torch.no_grad()
def _logprobs(model, sequence):
    tokens = torch.tensor([sequence])
    logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0]


def _push(rank, world_size, folder):
    from safetensors.torch import load_file

    from megatron_rl.actor.weights import HfReader
    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.engine.vllm_engine import EngineUse, VllmEngine
    from megatron_rl.models.stored_tensors import view_stored
    from megatron_rl.resharding.layouts import ActorLayout
    from megatron_rl.trainer.evaluate_model import _read_weights
    from tests.cut_shards import cut_shards, topology_of

    model, is_published = load_model(folder), "text_config" in _read_config(folder)
    layout = ActorLayout(tensor=1, pipeline=world_size)
    tokenizer = load_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None
    engine = VllmEngine(
        folder,
        RolloutSection(tensor=world_size, kv_cache_mib=8, stop=[" "] if tokenizer else []),
        tokenizer=tokenizer,
        topology=topology_of(layout, rank=rank),
        dtype=torch.float32,
        max_model_len=64,
        use=EngineUse(partial_rollouts=is_published),
    )
    tensors = load_file(f"{folder}/model.safetensors")

    def push(version):
        views = view_stored(tensors, engine.shape)
        shards = cut_shards(views, shape=engine.shape, layout=layout, rank=rank)
        engine.sync_weights(shards, version=version)

    push(0)
    for scored, sequence in zip(engine.score(SEQUENCES), SEQUENCES, strict=True):
        torch.testing.assert_close(scored, _logprobs(model, sequence), atol=1e-5, rtol=3e-6)
    if is_published:
        kept = _begin(engine, seed=1, keep=True)
        # The same weights, as `megatron-rl evaluate` reads the folder.
        engine.receive(_read_weights(HfReader(folder, engine.shape), engine), version=1)
        _check_parts(engine, kept, [model, model], versions=(0, 1), is_first=rank == 0)
        dropped = _begin(engine, seed=2, keep=False)
        newer = _scale(load_model(folder), tensors)
        push(2)
        _check_parts(engine, dropped, [model, newer], versions=(1, 2), is_first=rank == 0)
    if tokenizer is not None:
        _check_stop(engine, tokenizer)
    return True


def _read_config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def _begin(engine, *, seed, keep):
    """Pause requests after six tokens, with their recurrent states or without."""
    from megatron_rl.engine.engine import RolloutWindow

    prompts = [Prompt(index, (), tuple(range(3 + index, 40)), "", "") for index in range(2)]
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=16, seed=seed)
    window = RolloutWindow(prompts, 2, sampling, tokens=6)
    (started,) = engine.continue_generation([window], keep_cache=keep)
    return replace(window, tokens=16, started=started)


def _check_parts(engine, window, models, *, versions, is_first):
    """The tokens of each weight version have the log-probs of its model on all tokens before."""
    (responses,) = engine.continue_generation([window], keep_cache=True)
    whole = ((0, versions[0]), (6, versions[1]))
    assert any(each.versions == whole for each in responses)
    for place, response in enumerate(responses if is_first else ()):  # it has all tokens
        tokens = [*window.prompts[place // 2].token_ids, *response.token_ids.tolist()]
        reported = torch.from_numpy(response.rollout_logprobs)
        for part, model in zip((slice(0, 6), slice(6, None)), models, strict=True):
            wanted = _logprobs(model, tokens)[-len(response.token_ids) :]
            torch.testing.assert_close(reported[part], wanted[part], atol=1e-5, rtol=1e-5)


def _scale(model, tensors):
    """Multiply the text model's matrices, in place."""
    for key, tensor in (*model.state_dict().items(), *tensors.items()):
        if tensor.dim() > 1 and "visual" not in key:
            tensor.mul_(0.9)
    return model


def _check_stop(engine, tokenizer):
    """A response ends with the token whose text has a space, in the trainer's tokenizer."""
    sampling = SamplingSettings(temperature=2.0, top_p=1.0, max_tokens=24, seed=5)
    prompt = Prompt(0, ({"role": "user", "content": ""},), (3, 5), "", "", "{}")
    responses = engine.generate([prompt], samples=16, sampling=sampling)
    stopped = [one for one in responses if " " in one.text]
    assert stopped
    for one in responses:
        assert " " not in tokenizer.decode(one.token_ids[:-1])
    assert all(one.finish_reason == "stop" for one in stopped)


NAMES = ("Llama", "Mistral", "Qwen2Moe", "Qwen3_5Moe published", "Gemma3", "GptOss", "Glm4Moe",
         "DeepseekV3")  # fmt: skip
# Their parts are in others of these and in `test_sampling_masks.py`.
SLOW = ("Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "DeepseekV3 whole queries")


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_vllm_log_probs_match_transformers(name, tmp_path):
    _save_model(name, tmp_path)
    assert all(run_ranks(_push, 2, str(tmp_path)))
