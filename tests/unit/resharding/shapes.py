"""Small shapes of every architecture, and unique numbers for every element of their tensors."""

import torch
from torch import Tensor

from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.delta_net import DeltaShape
from megatron_rl.models.latent import LatentShape
from megatron_rl.models.shape import ExpertShape, ModelShape, tensor_shapes

DENSE_FIRST = ExpertShape(
    4, 2, 12, True, shared_ffn_hidden_size=28, first_layer=2, scoring="sigmoid"
)


def small_shape(architecture: str = "Qwen2ForCausalLM", **changes) -> ModelShape:
    """Build a shape with four layers and 8 query heads in 4 groups; all dimensions differ."""
    sizes = {
        "architecture": architecture,
        "num_layers": 4,
        "hidden_size": 20,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 37,
        "max_position_embeddings": 64,
        "rotary_base": 10000.0,
        "norm_epsilon": 1e-6,
        "tied_embeddings": False,
        "experts": {
            "Qwen3MoeForCausalLM": ExpertShape(4, 2, 12, True),
            "GptOssForCausalLM": ExpertShape(4, 2, 12, True),
            "Qwen2MoeForCausalLM": ExpertShape(4, 2, 12, False, shared_ffn_hidden_size=28),
            "Qwen3NextForCausalLM": ExpertShape(4, 2, 12, True, shared_ffn_hidden_size=28),
            "Qwen3_5MoeForCausalLM": ExpertShape(4, 2, 12, True, shared_ffn_hidden_size=28),
            "Glm4MoeForCausalLM": DENSE_FIRST,
            "DeepseekV3ForCausalLM": DENSE_FIRST,
        }.get(architecture),
        "options": {
            "Glm4MoeForCausalLM": ("attention_bias", "use_qk_norm"),
            "DeepseekV3ForCausalLM": ("q_lora_rank",),
        }.get(architecture, ()),
        "delta": DeltaShape(8, 16, 3, 5, 4, layers=(0, 2, 3))
        if ARCHITECTURES[architecture].has_delta_nets
        else None,
        "latent": LatentShape(6, 5, 2, 3) if architecture.startswith("Deepseek") else None,
    }
    return ModelShape(**(sizes | changes))


def numbered_tensors(shape: ModelShape) -> dict[str, Tensor]:
    """Build HF tensors in which every element of the model has a unique number, from 1."""
    tensors, start = {}, 1
    for name, size in tensor_shapes(shape).items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.int64).view(size)
        start += count
    return tensors
