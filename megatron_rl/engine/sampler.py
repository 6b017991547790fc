"""Choice between vLLM's two model runners, and with it the sampler."""


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
