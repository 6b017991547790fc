"""Arguments for vLLM: passed on, or refused by name with the reason or the setting to use."""

from megatron_rl.rollout.engine_arguments import REFUSED, _known, engine_argument_problems


def test_what_is_refused_and_what_is_unknown():
    given = {"enforce_eager": True, "logprobs_mode": "raw_logprobs", "tensor_parallel_size": 2,
             "enable_prefix_cachin": False}  # fmt: skip
    logprobs, tensor, unknown = engine_argument_problems(given)
    assert "rollout.engine.logprobs_mode: responses and their log-probs must be of" in logprobs
    assert tensor == "rollout.engine.tensor_parallel_size: set rollout.tensor; remove it"
    assert "vLLM has no such argument; did you mean enable_prefix_caching?" in unknown
    assert not engine_argument_problems({"enforce_eager": True, "enable_prefix_caching": False})
    assert not engine_argument_problems({})


def test_the_refused_ones_exist():
    """Otherwise a new name of vLLM would pass. What some releases lack is listed here."""
    assert REFUSED.keys() - _known() <= {"runner", "quantization_config"}
