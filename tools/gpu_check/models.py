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


def save_random_model(folder):
    """Write the model and return its config."""
    from megatron_rl.models.shape import read_model_shape, tensor_shapes

    config = {
        **(PUBLISHED if DEVICE == "cuda" else TINY),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
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
