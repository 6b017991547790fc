"""Tests of vLLM arguments: accepted, or rejected with the reason or the setting to use."""

import json
import os

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
from megatron_rl.engine.starting import (
    given_variables,
    preserved_process_state,
    unknown_variables,
    without_preloading,
)
from megatron_rl.errors import UserError
from megatron_rl.runtime.processes import has_cuda


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


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="vLLM preloads nothing for CUDA")
def test_vllm_preloads_nothing_for_programs_started_meanwhile(tmp_path, monkeypatch):
    """The linker would split the name of a library in a folder with a space."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
             "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 32,
             "max_position_embeddings": 64}  # fmt: skip
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True, "load_format": "dummy",
                 "block_size": 32, "max_model_len": 64, "enforce_eager": True}  # fmt: skip
    with preserved_process_state(rank=0, world_size=1, local_rank=0):
        with without_preloading():
            EngineArgs(**arguments).create_engine_config()
        assert "LD_PRELOAD" not in os.environ
        EngineArgs(**arguments).create_engine_config()
        assert "libgomp" in os.environ["LD_PRELOAD"]  # else this function can go
    assert "LD_PRELOAD" not in os.environ


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
