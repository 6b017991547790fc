"""Which arguments of vLLM a config may add by `rollout.engine`, and why not the others."""

import difflib
from collections.abc import Mapping
from typing import Any

_OWN = "the engine sets it itself"
_WEIGHTS = "every push replaces the weights, in the model's own dtype and shapes"
_MODEL = "engine and actor must compute the same model"
_PLACE = "engines live in the trainer's processes, as rollout.tensor says"
_SAMPLING = "responses and their log-probs must be of the policy that is trained"
# Each argument that would break a contract: why, or the setting that it has here.
REFUSED = {
    "model": "set model.path", "tokenizer": "set model.path", "dtype": "set trainer.dtype",
    "max_model_len": "set data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "set rollout.max_sequences", "seed": "set seed",
    "gpu_memory_utilization": "set rollout.memory_fraction",
    "kv_cache_memory_bytes": "set rollout.kv_cache_mib or rollout.memory_fraction",
    "tensor_parallel_size": "set rollout.tensor",
    "enable_expert_parallel": "set rollout.expert_parallel",
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
                     "prefill_context_parallel_size", "nnodes", "node_rank", "worker_cls",
                     "distributed_executor_backend"), _PLACE),
    **dict.fromkeys(("skip_tokenizer_init", "enable_sleep_mode", "weight_transfer_config"), _OWN),
    **dict.fromkeys(("load_format", "quantization", "quantization_config", "enable_lora",
                     "cpu_offload_gb", "model_loader_extra_config"), _WEIGHTS),
    **dict.fromkeys(("hf_overrides", "hf_config_path", "config_format", "revision", "model_impl",
                     "code_revision", "convert", "runner"), _MODEL),
    **dict.fromkeys(("logprobs_mode", "generation_config", "override_generation_config",
                     "logits_processors", "speculative_config"), _SAMPLING),
}  # fmt: skip


def engine_argument_problems(given: Mapping[str, Any]) -> list[str]:
    """Why vLLM cannot be given these arguments; vLLM is imported only where there are any."""
    if not given:
        return []
    known = _known()
    problems = []
    for name in given:
        if name in REFUSED:
            problems.append(f"rollout.engine.{name}: {REFUSED[name]}; remove it")
        elif name not in known:
            near = difflib.get_close_matches(name, known - REFUSED.keys(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            problems.append(f"rollout.engine.{name}: vLLM has no such argument{hint}")
    return problems


def _known() -> set[str]:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in fields(EngineArgs)}
