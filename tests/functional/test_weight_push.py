"""After a push vLLM computes what the model computes: every actor layout x vLLM layout.

The oracle is transformers' own Qwen2 in float32. The embedding's padding rows are NaN in the
shards, so that a push which lets one through is seen in every log-prob.
"""

import pytest
import torch

from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.types import Prompt, SamplingSettings
from tests.cut_shards import cut_shards, topology_of
from tests.ranks import run_ranks

VOCABULARY, LAYERS = 300, 4
PROMPTS = [
    Prompt(index, (), tuple(range(3 + index, 10 + 2 * index)), "", "test") for index in range(5)
]
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=12, seed=11)


def _save_model(folder, *, tied: bool) -> None:
    from transformers import Qwen2Config

    Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_id=2,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)


def _random_model(folder, *, seed: int):
    """transformers' model with large enough random weights that every one of them matters."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    with torch.random.fork_rng():
        model = Qwen2ForCausalLM(AutoConfig.from_pretrained(folder)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.1 * noise)
    return model


@torch.no_grad()
def _logprobs(model, sequence) -> torch.Tensor:
    tokens = torch.tensor([sequence])
    logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0]


def _push_and_compare(rank, world_size, folder, tensor, layouts):
    """One engine, one push of different weights per layout; returns the responses of each."""
    from megatron_rl.rollout.vllm_engine import VllmEngine

    first = ActorLayout(*layouts[0])
    torch.manual_seed(5)
    untouched = torch.get_rng_state()
    engine = VllmEngine(
        folder,
        tensor=tensor,
        topology=topology_of(first, rank=rank),
        dtype=torch.float32,
        max_model_len=64,
        kv_cache_bytes=8 << 20,
    )
    seen = []
    for version, sizes in enumerate(layouts):
        layout = ActorLayout(*sizes)
        assert layout.world_size == world_size
        model = _random_model(folder, seed=version)
        shards = cut_shards(model.state_dict(), shape=engine.shape, layout=layout, rank=rank)
        stats = engine.push_weights(shards, version=version)
        responses = engine.generate(PROMPTS, samples=3, sampling=SAMPLING)
        assert [r.weight_version for r in responses] == [version] * 15
        sequences = [
            list(PROMPTS[i // 3].token_ids) + list(r.token_ids) for i, r in enumerate(responses)
        ]
        for scored, sequence, response in zip(
            engine.score(sequences), sequences, responses, strict=True
        ):
            expected = _logprobs(model, sequence)
            torch.testing.assert_close(scored, expected, atol=1e-5, rtol=0)
            reported = torch.tensor(response.rollout_logprobs)
            torch.testing.assert_close(reported, expected[-len(reported) :], atol=1e-5, rtol=0)
        seen.append([(r.prompt_index, r.sample_index, r.token_ids) for r in responses])
    assert torch.equal(torch.get_rng_state(), untouched), "the trainer's generator was moved"
    torch.set_num_threads(1)
    return seen, stats.bytes_sent


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    _save_model(path, tied=request.param)
    return str(path)


LAUNCHES = {  # (world size, vLLM tensor): actor layouts (tensor, pipeline, context, data)
    (1, 1): [(1, 1, 1, 1)] * 2,
    (2, 1): [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    (2, 2): [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
}


def test_engine_computes_what_the_model_computes(folder):
    samples = {}
    for (world_size, tensor), layouts in LAUNCHES.items():
        ranks = run_ranks(_push_and_compare, world_size, folder, tensor, layouts)
        assert all(seen == ranks[0][0] for seen, _ in ranks), "ranks see different responses"
        for version, seen in enumerate(ranks[0][0]):
            samples.setdefault(version, []).append(seen)
    # The n-th push has the same weights everywhere, so the same seed must give the same samples.
    for version, seen in samples.items():
        assert all(each == seen[0] for each in seen), f"push {version} depends on the layout"
    assert samples[0][0] != samples[1][0], "the second push changed nothing"
