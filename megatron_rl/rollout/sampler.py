"""Which of its two model runners vLLM takes, and with it which sampler."""


def uses_newer_runner() -> bool:
    """Whether vLLM would run the newer model runner for a plain engine on this machine.

    The newer one draws every request's seeded number inside its sampling kernel; the older one
    keeps a generator per request and pays a kernel for each in every step. vLLM decides by
    VLLM_USE_V2_MODEL_RUNNER, else by whether Triton can run here (and older releases by the
    architecture: they take it for dense ones).
    """
    from vllm import envs
    from vllm.config import VllmConfig
    from vllm.triton_utils import HAS_TRITON

    asked = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", None)
    if asked is not None:
        return bool(asked)
    # Releases without the question have the older runner alone.
    return hasattr(VllmConfig, "use_v2_model_runner") and bool(HAS_TRITON)
