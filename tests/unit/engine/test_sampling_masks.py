"""Sampling masks as vLLM returns them on CUDA, and those that are refused."""

from types import SimpleNamespace

import pytest

from megatron_rl.engine.sampling_masks import EngineSamplingMasks, bound_sampling
from megatron_rl.types import SamplingSettings


def masks_of(rows):
    """Read the masks of an output with the tokens 4 and 7."""
    mask = None if rows is None else SimpleNamespace(token_ids=rows)
    completion = SimpleNamespace(token_ids=[4, 7], sampling_mask=mask)
    output = SimpleNamespace(request_id="0-0", outputs=[completion])
    return EngineSamplingMasks(on_cuda=True).of(output)


def test_masks_are_ids_and_their_numbers():
    ids, counts = masks_of([[1, 4, 9], [7]])
    assert (ids.tolist(), counts.tolist()) == ([1, 4, 9, 7], [3, 1])
    assert ids.dtype == counts.dtype == "int32"


@pytest.mark.parametrize("rows", [None, [[4]], [[4], []], [[4, 7], [4, 4]], [[4], [7], [8]]])
def test_masks_without_the_sampled_token_are_refused(rows):
    with pytest.raises(RuntimeError, match=r"sampling masks for 2 tokens.*unset rollout\.top_k"):
        masks_of(rows)


def test_settings_of_other_calls_suit_an_engine_with_masks():
    """It takes no temperature of 0, and needs a top-k."""
    greedy = bound_sampling(SamplingSettings(0.0, 0.9, 8, seed=1), vocab_size=50)
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)
    nucleus = bound_sampling(SamplingSettings(0.7, 0.9, 8, seed=1), vocab_size=50)
    assert (nucleus.temperature, nucleus.top_p, nucleus.top_k) == (0.7, 0.9, 50)
