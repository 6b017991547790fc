"""Records of the engine while it samples: the experts of each token and the tokens that it kept.

Read from vLLM, compared with transformers, brought to the ranks that train, and replayed there.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.functional.test_actor_layouts import randomise
from tests.ranks import run_ranks

EXPERTS, K, LAYERS = 8, 2, 4
PROMPTS = [[3, 5, 7, 11, 13], list(range(40, 70)), [299, 298, 1, 17], [8] * 9]
SAMPLES, VOCAB = 2, 300
TOP_K, TOP_P, MIN_P, TEMPERATURE = 20, 0.8, 0.02, 0.7
UNMASKED = 3  # this response is as of another run: without masks, so over the whole vocabulary
LAYOUTS = {
    "one": ({}, 1),
    "pp2-virtual2": ({"pipeline": 2, "virtual_stages": 2}, 2),
    "tp2-cp2-ep2": ({"tensor": 2, "context": 2, "expert": 2}, 4),
}


def _make_model(folder):
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=K, moe_intermediate_size=20, decoder_sparse_step=1,
        norm_topk_prob=True, max_position_embeddings=128, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


def _routes(rollout):
    """Experts of a rollout's tokens as [positions, layers, k]."""
    count = len(rollout.prompt.token_ids) + len(rollout.response.token_ids) - 1
    return rollout.response.routes.reshape(count, LAYERS, K)


@torch.no_grad()
def _transformers(folder, rollout, forced=None):
    """Logits / temperature that each token was drawn from, and the experts of all tokens.

    forced: experts to use instead of the router's choice, [positions, layers, k]. Returns
    [L, V] float64 and [positions, layers, k].
    """
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
    prompt = rollout.prompt.token_ids
    sequence = [*prompt, *rollout.response.token_ids.tolist()]
    logits = model(torch.tensor([sequence[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.double().numpy() / TEMPERATURE, torch.stack(chosen, 1).numpy()


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


def _generate(rank, world_size, folder, windows):
    """Generate with an engine on each rank, whose last one keeps the responses; or in windows.

    Windows come from one engine of all ranks, without routes.
    """
    from safetensors.torch import load_file

    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.data.token_rows import fetch_responses, is_local
    from megatron_rl.engine.engine import RolloutWindow
    from megatron_rl.engine.vllm_engine import VllmEngine
    from megatron_rl.resharding.layouts import ActorLayout
    from megatron_rl.types import Prompt, SamplingSettings
    from tests.cut_shards import cut_shards, topology_of

    layout = ActorLayout(tensor=1, pipeline=world_size)
    settings = RolloutSection(
        kv_cache_mib=8, max_num_seqs=3, tensor=world_size if windows else 1,
        top_k=TOP_K, top_p=TOP_P, min_p=MIN_P,
    )  # fmt: skip
    engine = VllmEngine(
        folder, settings, topology=topology_of(layout, rank=rank), dtype=torch.float32,
        max_model_len=64, partial_rollouts=windows, routes=not windows,
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
        brought = fetch_responses(responses, range(len(responses)))
    else:
        greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=5, seed=1)
        (one, other) = engine.generate(prompts[:1], samples=2, sampling=greedy)
        assert np.array_equal(one.token_ids, other.token_ids), "greedy, as an evaluation may be"
        assert not len(one.mask_ids), "an evaluation needs no masks"
        responses = engine.generate(prompts, samples=SAMPLES, sampling=sampling, on_all_ranks=False)
        for response in responses:
            assert is_local(response.routes) == (response.owner == rank), (
                "only the owner has routes"
            )
            assert rank or is_local(response.mask_ids), "rank 0 writes files"
        last = len(responses) - 1
        brought = fetch_responses(responses, [last] if rank == 0 else range(last + 1))
        if rank == 0:  # the writer receives the routes that it trains, and no others
            assert brought[last].owner == 1 and is_local(brought[last].routes)
            assert not any(is_local(one.routes) for one in brought[:last] if one.owner == 1)
    if rank == world_size - 1:
        Path(folder, f"responses-{windows}.pkl").write_bytes(pickle.dumps(brought))


def _generated(folder, *, windows=False):
    """The engine's rollouts as they are."""
    from megatron_rl.types import GradeResult, Prompt, Rollout

    rollouts = []
    responses = pickle.loads(Path(folder, f"responses-{windows}.pkl").read_bytes())
    for place, response in enumerate(responses):
        prompt = Prompt(place // SAMPLES, (), tuple(PROMPTS[place // SAMPLES]), "", "")
        every_rank_has_all = replace(response, owner=-1)
        rollouts.append(Rollout(prompt, every_rank_has_all, GradeResult(0.0, "", None)))
    return rollouts


def _changed(folder):
    """The rollouts with other experts for a third of the tokens, in another order; one unmasked."""
    generator, rollouts = np.random.default_rng(5), []
    for place, rollout in enumerate(_generated(folder)):
        routes = _routes(rollout).copy()
        other = generator.permuted(np.tile(np.arange(EXPERTS), (*routes.shape[:2], 1)), axis=2)
        is_other = generator.random(routes.shape[:2]) < 1 / 3
        routes[is_other] = other[is_other][:, :K]
        changes = {"routes": routes.reshape(-1).astype(np.uint8)}
        if place == UNMASKED:
            changes |= {name: np.empty(0, np.int32) for name in ("mask_ids", "mask_counts")}
        rollouts.append(replace(rollout, response=replace(rollout.response, **changes)))
    return rollouts


def _train(rank, world_size, folder, layout):
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
    from megatron_rl.objectives import build_objective

    rollouts, topology = _changed(folder), groups.initialise(**layout)
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=3e-3, weight_decay=0.0, epsilon=1e-4),
        warmup_updates=0, recompute="selective", overlap_reduction=world_size > 1,
        replay_routes=True, temperature=TEMPERATURE,
    )  # fmt: skip
    actor = MegatronActor(Path(folder), topology=topology, settings=settings)
    minibatches = plan_minibatches(
        rollouts, torch.linspace(-1, 1, len(rollouts)), minibatches=2, tokens_per_micro_batch=100,
        topology=topology, sequence_parallel=actor.sequence_parallel,
    )  # fmt: skip
    packs = [pack for minibatch in minibatches for pack in minibatch.micro_batches]
    actor.routing.use_engine_routes(packs, lambda pack: actor.packs.prepare(pack).host)
    scored = actor.compute_logprobs_and_entropies(packs, routing="record")
    changed = actor.routing.pop_counts()
    for pack, (logprobs, _) in zip(packs, scored, strict=True):
        pack.behavior_logprobs = logprobs
    rows = [
        gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
        for values in zip(*scored, strict=True)
    ]
    objective = build_objective("grpo")
    results = [actor.update(minibatches[update % 2], objective) for update in range(4)]
    return json.dumps(
        {
            "behavior": [row.tolist() for row in rows[0]],
            "entropies": [row.tolist() for row in rows[1]],
            "changed": (changed[:, 0] / changed[:, 1]).tolist(),
            "deviation": results[0].statistics.to_metrics()["ratio/max_deviation"],
            "grad_norms": [result.grad_norm for result in results],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling_records")
    _make_model(folder)
    run_ranks(_generate, 2, str(folder), False)
    return str(folder)


@pytest.fixture(scope="module")
def trained(folder):
    return {
        name: json.loads(run_ranks(_train, ranks, folder, layout)[0])
        for name, (layout, ranks) in LAYOUTS.items()
    }


def _check_masks(rollouts, all_logits):
    """The engine's kept tokens are those of the definitions, and its log-probs are over them."""
    agreed = []
    for rollout, logits in zip(rollouts, all_logits, strict=True):
        response = rollout.response
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
    assert 1 <= counts.min() < counts.max() <= TOP_K


def test_engine_returns_experts_and_kept_tokens(folder):
    rollouts, agreed = _generated(folder), []
    for rollout in rollouts:
        _, chosen = _transformers(folder, rollout)
        same = np.sort(_routes(rollout), 2) == np.sort(chosen, 2)
        agreed += same.all(2).ravel().tolist()
    assert len(agreed) > 200 and np.mean(agreed) > 0.995  # but for near ties
    _check_masks(rollouts, [_transformers(folder, one, _routes(one))[0] for one in rollouts])


def test_windows_of_a_response_keep_all_their_masks(folder):
    run_ranks(_generate, 2, folder, True)
    rollouts = _generated(folder, windows=True)
    _check_masks(rollouts, [_transformers(folder, one)[0] for one in rollouts])


def test_behavior_is_over_the_kept_tokens_with_the_engines_experts(folder, trained):
    found = trained["one"]
    for place, rollout in enumerate(_changed(folder)):
        logits, _ = _transformers(folder, rollout, _routes(rollout))
        masks = [np.arange(VOCAB)] * len(logits)
        if place != UNMASKED:
            masks = _masks(rollout.response)
        logs = [row[kept] - np.log(np.exp(row[kept]).sum())
                for row, kept in zip(logits, masks, strict=True)]  # fmt: skip
        expected = [
            each[kept == token].item()
            for each, kept, token in zip(logs, masks, rollout.response.token_ids, strict=True)
        ]
        np.testing.assert_allclose(found["behavior"][place], expected, atol=2e-5)
        entropies = [-(np.exp(each) * each).sum() for each in logs]
        np.testing.assert_allclose(found["entropies"][place], entropies, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_replay_the_same_records(trained, name):
    found, one = trained[name], trained["one"]
    assert found["deviation"] == 0.0
    assert all(0.2 < each < 0.8 for each in found["changed"])  # a third is another on purpose
    np.testing.assert_allclose(found["changed"], one["changed"], rtol=1e-6)
    for what in ("behavior", "entropies"):
        for mine, expected in zip(found[what], one[what], strict=True):
            np.testing.assert_allclose(mine, expected, atol=2e-5)
    np.testing.assert_allclose(found["grad_norms"], one["grad_norms"], rtol=2e-4)
