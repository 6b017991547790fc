"""vLLM arguments: checks of `rollout.engine`, and the choice of the model runner."""

import difflib
from collections.abc import Mapping
from typing import Any

_OWN = "the engine sets it itself"
_WEIGHTS = "every weight sync replaces the weights, in the model's own dtype and shapes"
_MODEL = "engine and actor must compute the same model"
_PROCESSES = "engines run in the trainer's processes, with rollout.tensor ranks each"
_SAMPLING = "responses and their log-probs must come from the policy that is trained"
# Arguments that would break an assumption of the trainer: the reason, or the setting to use.
REFUSED = {
    "model": "set model.path", "tokenizer": "set model.path", "dtype": "set trainer.dtype",
    "max_model_len": "set data.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "set rollout.max_num_seqs", "seed": "set seed",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set rollout.kv_cache_mib or rollout.gpu_memory_utilization",
    "tensor_parallel_size": "set rollout.tensor",
    "enable_expert_parallel": "set rollout.expert_parallel",
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
                     "prefill_context_parallel_size", "nnodes", "node_rank", "worker_cls",
                     "distributed_executor_backend"), _PROCESSES),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer_mode", "tokenizer_revision",
                     "enable_sleep_mode", "weight_transfer_config"), _OWN),
    "mamba_ssm_cache_dtype": "states of gated delta nets are float32, as in training",
    "trust_remote_code": "set model.trust_remote_code, which is for tokenizers",
    "enable_return_routed_experts": "set model.routing_replay",
    "return_sampling_mask": "set rollout.top_k",
    **dict.fromkeys(("load_format", "quantization", "quantization_config",
                     "cpu_offload_gb", "model_loader_extra_config"), _WEIGHTS),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype",
                     "lora_target_modules", "fully_sharded_loras"), "set lora.push"),
    **dict.fromkeys(("hf_overrides", "hf_config_path", "config_format", "revision", "model_impl",
                     "code_revision", "convert", "runner"), _MODEL),
    **dict.fromkeys(("logprobs_mode", "generation_config", "override_generation_config",
                     "logits_processors", "speculative_config"), _SAMPLING),
}  # fmt: skip


# vLLM's CPUAttentionBackend.get_supported_head_sizes: importing it takes many seconds.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


CPU_LATENT = 576  # of CPUMLABackend, whose kernel exists for this size alone


def cpu_engine_problems(
    *,
    head_dim: int,
    expert_parallel: bool,
    latent: int | None = None,
    cached_states: bool = False,
) -> list[str]:
    """List the reasons why vLLM cannot run this model on a CPU.

    latent: what latent attention caches of a token, instead of keys and values of heads.
    cached_states: whether prefixes of a model with gated delta nets are cached.
    """
    problems = []
    if cached_states:
        problems.append(
            "rollout.engine.enable_prefix_caching=true: on a CPU vLLM does not cache prefixes of "
            "models with gated delta nets; remove it"
        )
    if latent is not None and latent != CPU_LATENT:
        problems.append(
            f"model.path: its kv_lora_rank + qk_rope_head_dim is {latent}, but on a CPU vLLM "
            f"supports only {CPU_LATENT}; use another model, or a machine with a GPU"
        )
    elif latent is None and head_dim not in CPU_HEAD_SIZES:
        problems.append(
            f"model.path: its head_dim is {head_dim}, but on a CPU vLLM supports only "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; use another model, or a machine with a GPU"
        )
    if expert_parallel:
        problems.append(
            "rollout.expert_parallel=true: needs CUDA, because on a CPU vLLM keeps every expert on "
            "each rank; set it to false"
        )
    return problems


def engine_argument_problems(given: Mapping[str, Any]) -> list[str]:
    """List the arguments that cannot be passed to vLLM.

    It is imported only if there are some that are not refused anyway.
    """
    known = _known() if given.keys() - REFUSED.keys() else set()
    problems = []
    for name in given:
        if name in REFUSED:
            problems.append(f"rollout.engine.{name}: {REFUSED[name]}; remove it")
        elif name not in known:
            near = difflib.get_close_matches(name, known - REFUSED.keys(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            problems.append(f"rollout.engine.{name}: vLLM has no such argument{hint}")
    return problems


def knows_argument(name: str) -> bool:
    """Return whether the installed vLLM has an argument of this name."""
    return name in _known()


def _known() -> set[str]:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in fields(EngineArgs)}


def uses_newer_runner() -> bool:
    """Return whether vLLM would use its newer model runner for a plain engine on this machine.

    The newer runner draws the seeded numbers of all requests inside its sampling kernel; the older
    one keeps a generator per request and launches a kernel for each in every step. vLLM decides
    by VLLM_USE_V2_MODEL_RUNNER, otherwise takes the newer one if Triton can run here (older
    releases: for dense architectures).
    """
    from vllm import envs
    from vllm.config import VllmConfig
    from vllm.triton_utils import HAS_TRITON

    requested = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None)
    if requested is not None:
        return bool(requested)
    # Releases without this option only have the older runner.
    return hasattr(VllmConfig, "use_v2_model_runner") and bool(HAS_TRITON)
