"""Tests of vLLM arguments: accepted, or rejected with the reason or the setting to use."""

import pytest

from megatron_rl.engine import sampling_masks
from megatron_rl.engine.engine_arguments import (
    CPU_HEAD_SIZES,
    REFUSED,
    _known,
    cpu_engine_problems,
    engine_argument_problems,
)
from megatron_rl.engine.sampling_masks import EngineSamplingMasks
from megatron_rl.engine.starting import given_variables, unknown_variables
from megatron_rl.errors import UserError


def test_engine_argument_problems_name_rejected_and_unknown_arguments():
    given = {"enforce_eager": True, "logprobs_mode": "raw_logprobs", "tensor_parallel_size": 2,
             "enable_prefix_cachin": False}  # fmt: skip
    logprobs, tensor, unknown = engine_argument_problems(given)
    assert "rollout.engine.logprobs_mode: responses and their log-probs must come" in logprobs
    assert tensor == "rollout.engine.tensor_parallel_size: set rollout.tensor; remove it"
    assert "vLLM has no such argument; did you mean enable_prefix_caching?" in unknown
    assert not engine_argument_problems({"enforce_eager": True, "enable_prefix_caching": False})
    assert not engine_argument_problems({})


def test_variables_that_vllm_does_not_read_are_named(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert {"VLLM_USE_V1", "VLLM_LOGGING_LEVEL"} <= given_variables()
    text = unknown_variables(["VLLM_USE_V1", "VLLM_LOGGING_LEVEL", "VLLM_PLUGIN"])
    assert text.startswith("the environment has VLLM_PLUGIN, VLLM_USE_V1: vLLM ")
    assert unknown_variables(["VLLM_LOGGING_LEVEL"]) is None


def test_rejected_arguments_exist_in_vllm():
    """A renamed vLLM argument would otherwise be accepted. Some releases lack those listed."""
    assert REFUSED.keys() - _known() <= {
        "runner", "quantization_config", "return_sampling_mask"
    }  # fmt: skip


def test_engine_that_cannot_return_masks_is_refused(monkeypatch):
    assert EngineSamplingMasks(on_cuda=False).arguments() == {}
    with pytest.raises(UserError, match="newer model runner"):  # this machine has no Triton
        EngineSamplingMasks(on_cuda=True).arguments()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert EngineSamplingMasks(on_cuda=True).arguments() == {"return_sampling_mask": True}
    monkeypatch.setattr(sampling_masks, "_ARGUMENT", "return_what_no_release_has")
    with pytest.raises(UserError, match="need a vLLM that returns"):
        EngineSamplingMasks(on_cuda=True).arguments()


def test_cpu_head_sizes_match_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert not cpu_engine_problems(head_dim=64, expert_parallel=False)
    (problem,) = cpu_engine_problems(head_dim=64, expert_parallel=False, cached_states=True)
    assert "enable_prefix_caching=true: on a CPU vLLM does not cache prefixes" in problem
