"""Random model of the published size, and prompts for it."""

import json

import torch
from safetensors.torch import save_file

from tools.gpu_check.row import DEVICE, LOW

# DeepSeek-R1-Distill-Qwen-1.5B's config.json; on a CPU a small model that only tests the script.
PUBLISHED = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

# Qwen3-30B-A3B's config.json with fewer layers.
EXPERTS = {
    **(
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
        if DEVICE == "cuda"
        else {
            **TINY,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    ),
    "num_hidden_layers": 2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def save_random_model(folder, model=None):
    """Write a model (default: the 1.5B shape) and return its config."""
    from megatron_rl.models.shape import read_model_shape, tensor_shapes

    dense = {
        **(PUBLISHED if DEVICE == "cuda" else TINY),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
    }
    config = {
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "torch_dtype": "bfloat16",
        **(model or dense),
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    weights = {}
    for name, size in tensor_shapes(read_model_shape(folder)).items():
        made = torch.randn(size, dtype=LOW, device=DEVICE).mul_(0.02)
        weights[name] = (made + 1 if name.endswith("norm.weight") else made).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def make_rollouts(lengths, vocab):
    """Build one group of responses with random tokens, after a prompt of 16 tokens."""
    from megatron_rl.types import GradeResult, Prompt, Response, Rollout

    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for sample, length in enumerate(lengths):
        tokens = tuple(torch.randint(1, vocab, (length,), generator=generator).tolist())
        response = Response(0, sample, tokens[16:], (0.0,) * (length - 16), "", "stop", 0)
        rollouts.append(
            Rollout(Prompt(0, (), tokens[:16], "", ""), response, GradeResult(0.0, "", None))
        )
    return rollouts
