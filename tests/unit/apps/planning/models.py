"""Small models for dry runs, with weights or only a config.json."""

import json
from pathlib import Path

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = QWEN2 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                     "norm_topk_prob": True}  # fmt: skip
# Gloo's threads may free a message slightly later than the rank does. A message is less than 1% of
# a rank's memory at these sizes.
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 384, "vocab_size": 16384,
}  # fmt: skip
DENSE = QWEN2 | SMALL
# Every token uses every expert, so routing is balanced, as the dry run assumes.
WINDOW = DENSE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                  "sliding_window": 24}  # fmt: skip
EXPERTS = QWEN3_MOE | SMALL | {"head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4,
                               "num_experts_per_tok": 4}  # fmt: skip


def save_shape(folder: Path, values: dict) -> Path:
    """Create a model folder that contains only a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def save_model(folder: Path, values: dict) -> Path:
    """Create a model folder with random weights."""
    import torch
    from safetensors.torch import save_file

    from megatron_rl.models.shape import read_model_shape, tensor_shapes

    save_shape(folder, values)
    torch.manual_seed(0)
    sizes = tensor_shapes(read_model_shape(folder))
    weights = {name: torch.randn(size) * 0.05 for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
