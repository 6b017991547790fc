"""The tokens that the engine's sampler kept: read from vLLM, brought to the trainers, replayed."""

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

PROMPTS = [[3, 5, 7, 11, 13], list(range(40, 70)), [299, 298, 1, 17], [8] * 9]
SAMPLES, VOCAB = 2, 300
TOP_K, TOP_P, MIN_P, TEMPERATURE = 20, 0.8, 0.02, 0.7
LAYOUTS = {
    "one": ({}, 1),
    "tp2-cp2": ({"tensor": 2, "context": 2}, 4),
}


def _make_model(folder):
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


@torch.no_grad()
def _logits(folder, rollout):
    """Logits / temperature of transformers, from which each token was drawn; [L, V] float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, response = rollout.prompt.token_ids, rollout.response
    sequence = [*prompt, *response.token_ids.tolist()]
    logits = model(torch.tensor([sequence[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.double().numpy() / TEMPERATURE


def _kept(logits):
    """Ids that top-k, min-p and top-p keep of one token's logits, by their definitions."""
    chances = np.exp(logits - logits.max())
    chances[chances < MIN_P] = 0  # relative to the largest
    order = np.argsort(-chances, kind="stable")
    chances[order[TOP_K:]] = 0
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    return {int(one) for one in order[(before < TOP_P) & (chances[order] > 0)]}


def _masks(response):
    """The ids of each token."""
    return np.split(response.mask_ids, np.cumsum(response.mask_counts)[:-1])


def _generate(rank, world_size, folder, tensor, windows):
    """Generate; the responses with masks go to rank 1 of two, which keeps them."""
    from safetensors.torch import load_file

    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.data.token_rows import fetch_responses, is_local
    from megatron_rl.engine.engine import RolloutWindow
    from megatron_rl.engine.vllm_engine import EngineUse, VllmEngine
    from megatron_rl.resharding.layouts import ActorLayout
    from megatron_rl.types import Prompt, SamplingSettings
    from tests.cut_shards import cut_shards, topology_of

    layout = ActorLayout(tensor=1, pipeline=world_size)
    settings = RolloutSection(
        kv_cache_mib=8, max_num_seqs=3, tensor=tensor, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P
    )
    engine = VllmEngine(
        folder, settings, topology=topology_of(layout, rank=rank), dtype=torch.float32,
        max_model_len=64, use=EngineUse(partial_rollouts=windows),
    )  # fmt: skip
    tensors = load_file(f"{folder}/model.safetensors")
    engine.sync_weights(
        cut_shards(tensors, shape=engine.shape, layout=layout, rank=rank), version=0
    )
    sampling = SamplingSettings(
        temperature=TEMPERATURE, top_p=TOP_P, max_tokens=20, seed=1, top_k=TOP_K, min_p=MIN_P,
        returns_masks=True,
    )  # fmt: skip
    prompts = [Prompt(i, (), tuple(tokens), "", "") for i, tokens in enumerate(PROMPTS)]
    if windows:
        responses = []
        for tokens, keep in ((7, True), (13, False), (20, True)):
            window = RolloutWindow(prompts, SAMPLES, sampling, tokens=tokens, started=responses)
            (responses,) = engine.continue_generation([window], keep_cache=keep)
    else:
        greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=5, seed=1)
        (one, other) = engine.generate(prompts[:1], samples=2, sampling=greedy)
        assert np.array_equal(one.token_ids, other.token_ids), "greedy, as an evaluation may be"
        assert not len(one.mask_ids), "an evaluation needs no masks"
        responses = engine.generate(prompts, samples=SAMPLES, sampling=sampling, on_all_ranks=False)
    if world_size == 2 and rank == 0:
        assert all(is_local(one.mask_ids) for one in responses), "rank 0 writes files"
    brought = fetch_responses(responses, range(len(responses)))
    if rank == world_size - 1:
        Path(folder, f"responses-{windows}.pkl").write_bytes(pickle.dumps(brought))


def _rollouts(folder, *, windows=False):
    from megatron_rl.types import GradeResult, Prompt, Rollout

    rollouts = []
    responses = pickle.loads(Path(folder, f"responses-{windows}.pkl").read_bytes())
    for place, response in enumerate(responses):
        prompt = Prompt(place // SAMPLES, (), tuple(PROMPTS[place // SAMPLES]), "", "")
        if place == 3:  # of another run, without masks: the whole vocabulary
            none = np.empty(0, np.int32)
            changed = replace(response, mask_ids=none, mask_counts=none, owner=-1)
        else:
            changed = replace(response, owner=-1)  # every rank has all
        rollouts.append(Rollout(prompt, changed, GradeResult(0.0, "", None)))
    return rollouts


def _train(rank, world_size, folder, layout):
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    rollouts = _rollouts(folder)
    topology, actor, minibatches = build_trainer(folder, layout, rollouts, temperature=TEMPERATURE)
    packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
    scored = actor.compute_logprobs_and_entropies(packs)
    for pack, (logprobs, _) in zip(packs, scored, strict=True):
        pack.behavior_logprobs = logprobs
    rows = [
        gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
        for values in zip(*scored, strict=True)
    ]
    results = {}
    for name in ("grpo", "pnpo"):
        objective = build_objective(name)
        results[name] = [actor.update(minibatches[update % 2], objective) for update in range(2)]
        scored = actor.compute_logprobs(packs)
        for pack, logprobs in zip(packs, scored, strict=True):
            pack.behavior_logprobs = logprobs
    return json.dumps(
        {
            "behavior": [row.tolist() for row in rows[0]],
            "entropies": [row.tolist() for row in rows[1]],
            "deviations": [
                one[0].statistics.to_metrics()["ratio/max_deviation"] for one in results.values()
            ],
            "grad_norms": [one.grad_norm for each in results.values() for one in each],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling_masks")
    _make_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def generated(folder):
    run_ranks(_generate, 2, folder, 1, False)


@pytest.fixture(scope="module")
def trained(folder, generated):
    return {
        name: json.loads(run_ranks(_train, ranks, folder, layout)[0])
        for name, (layout, ranks) in LAYOUTS.items()
    }


def _check_masks(folder, rollouts):
    agreed = []
    for place, rollout in enumerate(rollouts):
        response, logits = rollout.response, _logits(folder, rollout)
        if place == 3:
            continue
        assert len(response.mask_counts) == response.length == len(logits)
        for token, kept, row, engine in zip(
            response.token_ids, _masks(response), logits, response.rollout_logprobs, strict=True
        ):
            agreed.append(_kept(row) == set(kept.tolist()))
            assert token in kept
            expected = row[token] - np.log(np.exp(row[kept]).sum())
            assert engine == pytest.approx(expected, abs=2e-5)
    assert len(agreed) > 100
    assert np.mean(agreed) > 0.99  # in float32 only a near tie may differ
    counts = np.concatenate([one.response.mask_counts for one in rollouts])
    assert 1 == counts.min() < counts.max() <= TOP_K


def test_engine_returns_the_kept_tokens(folder, generated):
    _check_masks(folder, _rollouts(folder))


def test_windows_of_a_response_keep_all_their_masks(folder):
    run_ranks(_generate, 2, folder, 2, True)
    _check_masks(folder, _rollouts(folder, windows=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_compute_logprobs_over_the_kept_tokens(folder, trained, name):
    found, one = trained[name], trained["one"]
    for place, rollout in enumerate(_rollouts(folder)):
        logits = _logits(folder, rollout)
        masks = [np.arange(VOCAB)] * len(logits) if place == 3 else _masks(rollout.response)
        logs = [row[kept] - np.log(np.exp(row[kept]).sum())
                for row, kept in zip(logits, masks, strict=True)]  # fmt: skip
        expected = [
            each[kept == token].item()
            for each, kept, token in zip(logs, masks, rollout.response.token_ids, strict=True)
        ]
        np.testing.assert_allclose(found["behavior"][place], expected, atol=2e-5)
        entropies = [-(np.exp(each) * each).sum() for each in logs]
        np.testing.assert_allclose(found["entropies"][place], entropies, atol=2e-5)
    assert found["deviations"] == [0.0, 0.0]
    np.testing.assert_allclose(found["grad_norms"], one["grad_norms"], rtol=2e-4)
