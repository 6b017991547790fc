"""What is missing for architectures that are often asked for; named where they are refused."""

_DELTA_NET = (
    "its gated delta net layers: Megatron-core 0.16 builds them with Transformer Engine and "
    "flash-linear-attention's Triton kernels only, without context parallelism or packed sequences"
)
_VISION = "vision models; save the text model by itself as Gemma3ForCausalLM, see docs/models.md"

MISSING = {
    "Qwen3NextForCausalLM": _DELTA_NET,
    "Qwen3_5ForCausalLM": _DELTA_NET,
    "Qwen3_5MoeForCausalLM": _DELTA_NET,
    "Qwen3_5ForConditionalGeneration": _DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_NET,
    "Gemma3ForConditionalGeneration": _VISION,
}
