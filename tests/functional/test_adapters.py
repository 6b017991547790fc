"""vLLM computes with adapters itself: log-probs of merged models, versions, and refusals.

One engine of two ranks receives factors cut for Megatron's tensor parallelism, without Megatron.
"""

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from megatron_rl.models.shape import tensor_shapes
from megatron_rl.models.weights import Factors
from megatron_rl.types import Prompt, SamplingSettings
from tests.functional.test_architectures import SEQUENCES, _logprobs, _save_model
from tests.ranks import run_ranks

RANK, SCALE, TARGETS = 4, 1.5, ("qkv", "proj", "fc1", "fc2")
PROMPTS = [Prompt(index, (), tuple(range(3 + index, 9 + index)), "", "") for index in range(4)]
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=16, seed=5)


class Source:
    """Base weights of a folder and random factors of one version, cut for a rank."""

    def __init__(self, folder, engine, layout, rank, version):
        from safetensors.torch import load_file

        from tests.cut_shards import cut_shards

        generator = torch.Generator().manual_seed(version)
        shape = replace(engine.shape, factors=Factors(RANK, TARGETS))
        self.factors = {
            name: 0.02 * torch.randn(size, generator=generator)
            for name, size in tensor_shapes(shape).items()
        }
        self.base = load_file(f"{folder}/model.safetensors")
        self.sources = [
            cut_shards(tensors, shape=each, layout=layout, rank=rank)
            for tensors, each in ((self.base, engine.shape), (self.factors, shape))
        ]

    def push_sources(self):
        return self.sources

    def merged(self, folder):
        """Return the model with W + scale B A in transformers."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, b in self.factors.items():
            if "lora_B" not in name:
                continue
            module = name.removesuffix(".lora_B.weight")
            shared = re.sub("[kv]_proj$", "q_proj", module).replace("up_proj", "gate_proj")
            update = SCALE * b.double() @ self.factors[f"{shared}.lora_A.weight"].double()
            weight = model.get_parameter(f"{module}.weight")
            weight.data = (weight.double() + update).float()
        return model


def start(rank, world_size, folder):
    from megatron_rl.config.sections import LoraSection, RolloutSection
    from megatron_rl.engine.adapters import AdapterSettings
    from megatron_rl.engine.vllm_engine import EngineUse, VllmEngine
    from megatron_rl.resharding.layouts import ActorLayout
    from tests.cut_shards import topology_of

    layout = ActorLayout(tensor=world_size)
    lora = LoraSection(rank=RANK, alpha=SCALE * RANK, targets=TARGETS)
    engine = VllmEngine(
        folder, RolloutSection(tensor=world_size, kv_cache_mib=8),
        topology=topology_of(layout, rank=rank), dtype=torch.float32,
        max_model_len=64, use=EngineUse(partial_rollouts=True, adapters=AdapterSettings(lora, 2)),
    )  # fmt: skip
    return engine, [Source(folder, engine, layout, rank, version) for version in range(4)]


def compare_scores(engine, model):
    for scored, sequence in zip(engine.score(SEQUENCES), SEQUENCES, strict=True):
        torch.testing.assert_close(scored, _logprobs(model, sequence), atol=1e-5, rtol=1e-5)


def check_response(response, prompt, models):
    """Compare the log-probs of each range of tokens with those of its version's merged model."""
    tokens = [*prompt.token_ids, *response.token_ids.tolist()]
    reported = torch.from_numpy(response.rollout_logprobs)
    ends = [first for first, _ in response.versions[1:]] + [len(response.token_ids)]
    for (first, version), end in zip(response.versions, ends, strict=True):
        wanted = _logprobs(models[version], tokens)[-len(response.token_ids) :]
        torch.testing.assert_close(reported[first:end], wanted[first:end], atol=1e-5, rtol=0)


def check_partial_rollouts(engine, sources, models, rank):
    """Kept requests end with the adapters that they began with, others with the newest."""
    from megatron_rl.engine.engine import RolloutWindow

    def begin(seed, *, keep):
        window = RolloutWindow(PROMPTS, 2, replace(SAMPLING, seed=seed), tokens=6)
        (started,) = engine.continue_generation([window], keep_cache=keep)
        return replace(window, tokens=16, started=started)

    dropped, kept = begin(1, keep=False), begin(2, keep=True)
    engine.sync_weights(sources[1], version=1)
    for window, versions in ((kept, ((0, 0),)), (dropped, ((0, 0), (6, 1)))):
        (responses,) = engine.continue_generation([window], keep_cache=True)
        assert {each.versions for each in responses} <= {versions, ((0, 0),)}
        assert any(each.versions == versions for each in responses)
        for place, response in enumerate(responses if rank == 0 else ()):  # it has all tokens
            check_response(response, PROMPTS[place // 2], models)
    late = begin(3, keep=True)
    engine.sync_weights(sources[2], version=2)
    engine.sync_weights(sources[3], version=3)
    with pytest.raises(RuntimeError, match=r"no adapters of weight version 1, only of \[2, 3\]"):
        engine.continue_generation([late], keep_cache=True)
    (responses,) = engine.continue_generation([late], keep_cache=True)
    assert any(each.versions == ((0, 1), (6, 3)) for each in responses)


@contextlib.contextmanager
def replaced(owner, name, value):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        setattr(owner, name, original)


def check_refusals(engine, source, rank):
    """Without its version the engine does not generate; a wrong push is an error on all ranks."""

    def refuses(message):
        with pytest.raises(RuntimeError, match=message):
            engine.generate(PROMPTS, samples=1, sampling=SAMPLING)

    core, manager = engine._llm.llm_engine, engine._adapters._manager
    core.remove_lora(3 + 1)
    refuses(r"no adapters of weight version 3, only of \[2\], and does not generate without them")
    never_sent = pytest.raises(
        RuntimeError, match=r"weight sync 4.* no adapters of weight version 4"
    )
    with replaced(core, "add_lora", lambda request: True), never_sent:
        engine.sync_weights(source, version=4)
    refuses("no valid weights")

    def activate_wrongly(version):
        activated = original(version)
        if rank == 1:
            module = manager.modules["model.layers.1.mlp.down_proj"]
            module.lora_b_stacked[0][manager.lora_index_to_id.index(version), 0, 3, 1] += 1e-3
        return activated

    with replaced(manager, "activate_adapter", activate_wrongly) as original:
        wrong = r"vLLM has other values .*'model.layers.1.mlp.down_proj.lora_b'"
        with pytest.raises(RuntimeError, match=wrong if rank == 1 else "rank 1"):
            engine.sync_weights(source, version=4)
    refuses("no valid weights")
    engine.sync_weights(source, version=4)
    assert len(engine.generate(PROMPTS, samples=1, sampling=SAMPLING)) == len(PROMPTS)


def use_adapters(rank, world_size, folder, everything):
    from megatron_rl.models.adapters import slot_elements

    engine, sources = start(rank, world_size, folder)
    models = [source.merged(folder) for source in sources]
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.score(SEQUENCES)
    first = engine.sync_weights(sources[0], version=0)
    compare_scores(engine, models[0])
    if everything:
        check_partial_rollouts(engine, sources, models, rank)
    second = engine.sync_weights(sources[3], version=3)
    compare_scores(engine, models[3])
    base, factors = (
        sum(map(torch.numel, each.values())) for each in (sources[0].base, sources[0].factors)
    )
    # Every rank receives whole factors; base weights cross once, half of them to each rank.
    assert second.bytes_sent + second.bytes_local == 4 * world_size * factors
    assert first.bytes_sent + first.bytes_local >= 4 * (base + world_size * factors)
    held = [
        stacked.numel()
        for module in engine._adapters._manager.modules.values()
        for stacked in (*module.lora_a_stacked, *module.lora_b_stacked)
    ]
    counted = slot_elements(engine.shape, rank=RANK, targets=TARGETS, tensor=world_size)
    assert sum(held) == 2 * counted  # versions
    if everything:
        check_refusals(engine, sources[1], rank)
    return True


@pytest.mark.parametrize("name", ["Qwen2", pytest.param("Gemma3", marks=pytest.mark.slow)])
def test_engine_with_adapters_computes_the_merged_model(name, tmp_path):
    _save_model(name, tmp_path)
    assert all(run_ranks(use_adapters, 2, str(tmp_path), name == "Qwen2"))
