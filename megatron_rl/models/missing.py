"""Reasons why models that are often asked for are refused, and what can be done."""

from typing import Any

MISSING_KEYS = {
    "dual_chunk_attention_config": "for sequences shorter than its chunk_size attention is the "
    "ordinary one: remove the key for runs whose sequences are",
    "quantization_config": "quantized weights: use or make a copy in bfloat16",
}
# Parts of models of several modalities, and model_type of the text models that are supported.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
_OTHER_PARTS = ("vision_config", "audio_config")
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM", "mistral": "MistralForCausalLM",
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
_DEFAULT_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}


def why_missing(architecture: str, config: dict[str, Any]) -> str | None:
    """Return what is missing for an architecture that is not supported; None if unknown."""
    texts = [config[part] for part in _TEXT_PARTS if isinstance(config.get(part), dict)]
    kind = _DEFAULT_TEXT_MODELS.get(architecture)
    if not texts and kind is None and not any(part in config for part in _OTHER_PARTS):
        return None
    kind = texts[0].get("model_type", kind) if texts else kind
    if kind in TEXT_MODELS:
        return (
            "a model of several modalities; its text model is supported: save it by itself as "
            f"{TEXT_MODELS[kind]}, see docs/models.md#several-modalities"
        )
    return f"a model of several modalities; its text model, {kind!r}, is not supported either"
