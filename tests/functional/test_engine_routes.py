"""The engine's routes in training: read from vLLM, brought to the ranks that train, replayed."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.functional.response_trainer import build_trainer
from tests.functional.test_actor_layouts import randomise
from tests.ranks import run_ranks

EXPERTS, K, LAYERS = 8, 2, 4
PROMPTS = [[3, 5, 7, 11, 13], list(range(40, 70)), [299, 298, 1, 17], [8] * 9]
SAMPLES = 2
LAYOUTS = {
    "one": ({}, 1),
    "pp2-virtual2": ({"pipeline": 2, "virtual_stages": 2}, 2),
    "tp2-cp2-ep2": ({"tensor": 2, "context": 2, "expert": 2}, 4),
}


def _make_model(folder):
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=K, moe_intermediate_size=20, decoder_sparse_step=1,
        norm_topk_prob=True, max_position_embeddings=128, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


def _read(response, prompt):
    """Routes of a response as [positions, layers, k]."""
    return response.routes.reshape(len(prompt) + len(response.token_ids) - 1, LAYERS, K)


@torch.no_grad()
def _transformers(folder, sequence, forced=None):
    """Log-probs of a sequence and the experts of its tokens; forced: [positions, layers, k]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen = []

    def hook(gate, arguments, result):
        layer = len(chosen)
        logits, scores, indices = result
        if forced is not None:
            indices = torch.from_numpy(forced[:, layer].astype(np.int64))
            scores = logits.softmax(-1).gather(1, indices)
            scores = scores / scores.sum(-1, keepdim=True)
        chosen.append(indices)
        return logits, scores, indices

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(hook)
    logprobs = model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
    logprobs = logprobs.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    return logprobs.numpy(), torch.stack(chosen, 1).numpy()


def _generate(rank, world_size, folder):
    """Generate with two engines; check the routes of each against transformers, then send them."""
    from safetensors.torch import load_file

    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.data.token_rows import fetch_responses, is_local
    from megatron_rl.engine.vllm_engine import EngineUse, VllmEngine
    from megatron_rl.resharding.layouts import ActorLayout
    from megatron_rl.types import Prompt, SamplingSettings
    from tests.cut_shards import cut_shards, topology_of

    layout = ActorLayout(tensor=1, pipeline=world_size)
    engine = VllmEngine(
        folder, RolloutSection(kv_cache_mib=8, max_num_seqs=3),
        topology=topology_of(layout, rank=rank), dtype=torch.float32, max_model_len=64,
        use=EngineUse(routes=True),
    )  # fmt: skip
    tensors = load_file(f"{folder}/model.safetensors")
    engine.sync_weights(
        cut_shards(tensors, shape=engine.shape, layout=layout, rank=rank), version=0
    )
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=20, seed=1)
    prompts = [Prompt(i, (), tuple(tokens), "", "") for i, tokens in enumerate(PROMPTS)]
    responses = engine.generate(prompts, samples=SAMPLES, sampling=sampling, on_all_ranks=False)
    agreed = []
    for place, response in enumerate(responses):
        assert is_local(response.routes) == (response.owner == rank), "only the owner has routes"
        if response.owner == rank:
            prompt = PROMPTS[place // SAMPLES]
            routes = _read(response, prompt)
            _, chosen = _transformers(folder, [*prompt, *response.token_ids.tolist()])
            agreed += (np.sort(routes, 2) == np.sort(chosen, 2)).all(2).ravel().tolist()
    needed = range(len(responses)) if rank == 1 else [len(responses) - 1]
    brought = fetch_responses(responses, needed)
    if rank == 1:
        Path(folder, "responses.pkl").write_bytes(pickle.dumps(brought))
    else:  # the writer receives the routes that it trains, and no others
        assert brought[-1].owner == 1 and is_local(brought[-1].routes)
        assert not any(is_local(one.routes) for one in brought[:-1] if one.owner == 1)
    return float(np.mean(agreed)), len(agreed)


def _rollouts(folder):
    """The responses with other experts for a third of the tokens, in another order."""
    from megatron_rl.types import GradeResult, Prompt, Rollout

    generator = np.random.default_rng(5)
    rollouts = []
    for place, response in enumerate(pickle.loads(Path(folder, "responses.pkl").read_bytes())):
        prompt = PROMPTS[place // SAMPLES]
        routes = _read(response, prompt).copy()
        other = generator.permuted(np.tile(np.arange(EXPERTS), (*routes.shape[:2], 1)), axis=2)
        is_other = generator.random(routes.shape[:2]) < 1 / 3
        routes[is_other] = other[is_other][:, :K]
        flat = routes.reshape(-1).astype(np.uint8)
        changed = replace(response, routes=flat, owner=-1)  # every rank has all
        prompt = Prompt(place // SAMPLES, (), tuple(prompt), "", "")
        rollouts.append(Rollout(prompt, changed, GradeResult(0.0, "", None)))
    return rollouts


def _train(rank, world_size, folder, layout):
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    rollouts = _rollouts(folder)
    topology, actor, minibatches = build_trainer(folder, layout, rollouts, replay_routes=True)
    packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
    actor.routing.use_engine_routes(packs, lambda pack: actor.packs.prepare(pack).host)
    behavior = actor.compute_logprobs(packs, routing="record")
    changed = actor.routing.pop_counts()
    for pack, logprobs in zip(packs, behavior, strict=True):
        pack.behavior_logprobs = logprobs
    rows = gather_by_rollout(packs, behavior, count=len(rollouts), topology=topology)
    objective = build_objective("grpo")
    results = [actor.update(minibatch, objective) for minibatch in minibatches]
    deviation = results[0].statistics.to_metrics()["ratio/max_deviation"]
    return json.dumps(
        {
            "behavior": [row.tolist() for row in rows],
            "changed": (changed[:, 0] / changed[:, 1]).tolist(),
            "deviation": deviation,
            "grad_norms": [result.grad_norm for result in results],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine_routes")
    _make_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def generated(folder):
    return run_ranks(_generate, 2, folder)


@pytest.fixture(scope="module")
def trained(folder, generated):
    return {
        name: json.loads(run_ranks(_train, ranks, folder, layout)[0])
        for name, (layout, ranks) in LAYOUTS.items()
    }


def test_engine_returns_its_routes_for_every_token(generated):
    for agreed, count in generated:
        assert count > 100
        assert agreed > 0.995  # in float32 only a near tie may differ


def test_behavior_pass_uses_the_engines_experts(folder, trained):
    for rollout, behavior in zip(_rollouts(folder), trained["one"]["behavior"], strict=True):
        prompt, response = rollout.prompt.token_ids, rollout.response
        sequence = [*prompt, *response.token_ids.tolist()]
        expected, _ = _transformers(folder, sequence, forced=_read(response, prompt))
        np.testing.assert_allclose(behavior, expected[len(prompt) - 1 :], atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_replay_the_same_experts(trained, name):
    found, one = trained[name], trained["one"]
    assert found["deviation"] == 0.0
    assert all(0.2 < each < 0.8 for each in found["changed"])  # a third is another on purpose
    np.testing.assert_allclose(found["changed"], one["changed"], rtol=1e-6)
    for behavior, expected in zip(found["behavior"], one["behavior"], strict=True):
        np.testing.assert_allclose(behavior, expected, atol=2e-5)
    np.testing.assert_allclose(found["grad_norms"], one["grad_norms"], rtol=2e-4)
