"""Shapes of large models, for counting and simulating; no files are read."""

from megatron_rl.models.shape import ExpertShape, ModelShape


def _shape(
    architecture: str, layers: int, hidden: int, heads: int, groups: int, **changes: object
) -> ModelShape:
    sizes: dict = {
        "architecture": architecture,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": 128,
        "ffn_hidden_size": 3 * hidden,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rotary_base": 1e6,
        "norm_epsilon": 1e-6,
        "tied_embeddings": False,
    }
    return ModelShape(**(sizes | changes))


def qwen3_235b(layers: int = 94) -> ModelShape:
    """Return Qwen3-235B-A22B, or its first layers."""
    return _shape(
        "Qwen3MoeForCausalLM", layers, 4096, 64, 4, experts=ExpertShape(128, 8, 1536, True)
    )


def qwen3_30b(layers: int = 48) -> ModelShape:
    """Return Qwen3-30B-A3B, or its first layers."""
    return _shape(
        "Qwen3MoeForCausalLM", layers, 2048, 32, 4, experts=ExpertShape(128, 8, 768, True)
    )


def qwen25_72b(layers: int = 80) -> ModelShape:
    """Return Qwen2.5-72B, or its first layers."""
    return _shape("Qwen2ForCausalLM", layers, 8192, 64, 8, ffn_hidden_size=29568, vocab_size=152064)
