"""Weight sync between real Megatron and vLLM: afterwards both compute the same log-probs.

One launch per engine layout, in which the actor is rebuilt in several layouts. Weights are random
and large enough that each of them matters; log-probs are compared in float32 to 1e-5.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.types import GradeResult, Prompt, Rollout, SamplingSettings
from tests.ranks import run_ranks

PROMPTS = [
    Prompt(index, (), tuple(range(3 + index, 10 + 2 * index)), "", "test") for index in range(5)
]
SAMPLES = 2
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=6, seed=11)


def _save_model(
    folder: Path, *, tied: bool = False, experts: bool = False, layers: int = 2
) -> None:
    import transformers

    sizes = {
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }
    if experts:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        sizes |= {"norm_topk_prob": True, "head_dim": 64}
    name = "Qwen3Moe" if experts else "Qwen2"
    config = getattr(transformers, f"{name}Config")(**sizes, architectures=[f"{name}ForCausalLM"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.1 * noise)
    model.save_pretrained(folder)


def _actor(folder, sizes, **experts):
    """Build the actor in one layout, after destroying the previous process groups."""
    from megatron.core import parallel_state

    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.groups import initialise
    from megatron_rl.actor.settings import ActorSettings

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    tensor, pipeline, context, _ = sizes
    topology = initialise(tensor=tensor, pipeline=pipeline, context=context, **experts)
    return MegatronActor(folder, topology=topology, settings=ActorSettings())


def _engine(folder, tensor, topology):
    from megatron_rl.config.sections import ReshardingSection, RolloutSection
    from megatron_rl.engine.vllm_engine import SyncSettings, VllmEngine

    engine = VllmEngine(
        folder,
        RolloutSection(tensor=tensor, kv_cache_mib=8),
        topology=topology,
        dtype=torch.float32,
        max_model_len=64,
        sync=SyncSettings(ReshardingSection(bucket_mib=1 / 16)),
    )
    engine._resharder.full_check_every = 1
    return engine


def _limit(engine, *, seconds):
    engine.settings = engine.settings.model_copy(update={"stall_seconds": seconds})


def _compare_logprobs(actor, engine, version):
    """Generate and compare both kinds of engine log-probs with the actor's; returns samples."""
    from megatron_rl.data.packing import build_pack

    responses = engine.generate(PROMPTS, samples=SAMPLES, sampling=SAMPLING)
    assert [r.weight_version for r in responses] == [version] * len(PROMPTS) * SAMPLES
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
    rollouts = [
        Rollout(prompt, response, GradeResult(0.0, "", None))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    pack = build_pack(
        rollouts,
        torch.zeros(len(rollouts)),
        indices=range(len(rollouts)),
        alignment=actor.topology.alignment,
    )
    computed = actor.compute_logprobs([pack])[0][pack.response_mask]
    reported = pack.rollout_logprobs[pack.response_mask]
    torch.testing.assert_close(reported, computed, atol=1e-5, rtol=0)
    sequences = [[*r.prompt.token_ids, *r.response.token_ids] for r in rollouts]
    scores = [
        score[-len(r.response.token_ids) :]
        for score, r in zip(engine.score(sequences), rollouts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(scores), computed, atol=1e-5, rtol=0)
    return [response.token_ids.tolist() for response in responses]


def _push_and_compare(rank, world_size, folder, tensor, layouts, **experts):
    """Sync two different weights in every layout; returns the samples after each sync."""
    engine, samples = None, []
    for number, sizes in enumerate(layouts):
        actor = _actor(folder, sizes, **experts)
        if engine is None:
            generator, threads = torch.get_rng_state(), torch.get_num_threads()
            engine = _engine(folder, tensor, actor.topology)
        for version in (2 * number, 2 * number + 1):
            engine.sync_weights(actor, version=version)
            samples.append(_compare_logprobs(actor, engine, version))
            with torch.no_grad():
                for parameter in actor.named_parameters_local().values():
                    parameter.mul_(1.1)  # identically on every shard
        assert torch.equal(torch.get_rng_state(), generator), "a global generator was moved"
        assert torch.get_num_threads() == threads
    return samples


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sync_weights_engine_matches_actor_in_every_layout(tied, tmp_path):
    _save_model(tmp_path, tied=tied)
    launches = [(2, 1, [(2, 1, 1, 1), (1, 1, 2, 1)]), (2, 2, [(1, 2, 1, 1), (1, 1, 1, 2)])]
    if tied:
        launches = [(2, 2, [(1, 2, 1, 1), (2, 1, 1, 1)])]
    samples = []
    for world_size, tensor, layouts in launches:
        ranks = run_ranks(_push_and_compare, world_size, str(tmp_path), tensor, layouts)
        assert all(each == ranks[0] for each in ranks), "ranks see different responses"
        samples += [
            (first, second) for first, second in zip(ranks[0][::2], ranks[0][1::2], strict=True)
        ]
    # Equal weights and seeds give equal samples in all layouts of actor and engine.
    assert all(pair == samples[0] for pair in samples)
    assert samples[0][0] != samples[0][1], "the second push changed nothing"


def _load_and_write_experts(actor, engine):
    """Return pairs: a layer's experts as vLLM's loaders leave them, and as written directly.

    Triton's kernels on CUDA compute with both as they are; on a CPU vLLM repacks them afterwards.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as of_vllm

    from megatron_rl.resharding.push import Resharder

    loaded, method = [], of_vllm.UnquantizedFusedMoEMethod
    process = method.process_weights_after_loading

    def capture(self, layer):
        loaded.extend([layer.w13_weight.detach().clone(), layer.w2_weight.detach().clone()])
        process(self, layer)

    method.process_weights_after_loading = capture
    engine.sync_weights(actor, version=0)
    method.process_weights_after_loading = process
    sizes = engine.layout.parameter_shapes(actor.shape, rank=actor.topology.rank)
    live = {name: torch.zeros(size) for name, size in sizes.items()}
    receiver = SimpleNamespace(
        layout=engine.layout, dtype=torch.float32, check_idle=lambda: None,
        live_parameters=lambda: live, overwrite=lambda write, version: write() or 0.0,
    )  # fmt: skip
    Resharder(receiver).push(actor, version=0)
    written = [live[name] for kind in ("w13", "w2") for name in live if f"{kind}_weight" in name]
    layers = len(written) // 2
    assert len(loaded) == len(written) == 2 * actor.shape.num_layers
    return list(
        zip(loaded, [each for n in range(layers) for each in written[n::layers]], strict=True)
    )


def _push_experts(rank, world_size, folder):
    """Sync whole experts on each actor rank to a slice of every expert on each engine rank."""
    from megatron_rl.config.sections import RolloutSection
    from megatron_rl.engine.vllm_engine import VllmEngine

    actor = _actor(folder, (1, 1, 1, 2), expert=2)
    with pytest.raises(ValueError, match="needs CUDA"):
        VllmEngine(
            folder,
            RolloutSection(tensor=2, expert_parallel=True),
            topology=actor.topology,
            dtype=torch.float32,
            max_model_len=64,
        )
    engine = _engine(folder, 2, actor.topology)
    for loaded, written in _load_and_write_experts(actor, engine):
        assert torch.equal(loaded, written)
    for version in (0, 1):  # the second update starts with the kernels of the first one
        stats = engine.sync_weights(actor, version=version)
        _compare_logprobs(actor, engine, version)
        with torch.no_grad():
            for parameter in actor.named_parameters_local().values():
                parameter.mul_(1.1)
    # Half of each of 2 x 4 experts (3 matrices of 64 x 128 float32) is sent to the other rank.
    return stats.bytes_sent == 2 * 4 * 3 * 64 * 128 * 4 // 2


def test_sync_weights_from_expert_parallel_actor(tmp_path):
    _save_model(tmp_path, experts=True)
    assert all(run_ranks(_push_experts, 2, str(tmp_path)))


def _push_shared_heads_and_whole_experts(rank, world_size, folder):
    """Sync 3 layers, 2 key-value heads and 4 experts, from tensor size 4 and from 2 stages."""
    layouts = [(4, 1, 1, 1), (2, 2, 1, 1)]
    return _push_and_compare(rank, world_size, folder, 2, layouts, expert=2, expert_tensor=1)


def test_sync_weights_with_shared_heads_uneven_stages_and_whole_experts(tmp_path):
    _save_model(tmp_path, experts=True, layers=3)
    ranks = run_ranks(_push_shared_heads_and_whole_experts, 4, str(tmp_path))
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][:2] == ranks[0][2:], "the samples depend on the layout"


def _push_into_a_new_vllm(actor, engine):
    """Return the error if vLLM's parameters are not the expected ones."""
    from megatron_rl.resharding.layouts import EngineLayout

    class OtherTable(EngineLayout):
        def parameter_shapes(self, shape, *, rank):
            shapes = super().parameter_shapes(shape, rank=rank)
            shapes["model.scale"] = shapes.pop("model.norm.weight")
            return shapes

    known, engine.layout = engine.layout, OtherTable(tensor=1, world_size=1)
    with pytest.raises(ValueError) as error:
        engine.sync_weights(actor, version=4)
    engine.layout = known
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(PROMPTS, samples=1, sampling=SAMPLING)
    return str(error.value)


def _break_syncs(rank, world_size, folder):
    """Return the errors of invalid syncs into a real engine, and check that it recovers."""
    from tests.gather_push import gather_push

    actor = _actor(folder, (1, 1, 1, 1))
    engine = _engine(folder, 1, actor.topology)
    collected = {}

    class Collector:
        layout, dtype = engine.layout, engine.dtype

        def check_idle(self): ...

        def receive(self, weights, *, version):
            collected.update(weights)
            return 0.0

    gather_push(actor, Collector(), version=0)
    name = "model.layers.1.self_attn.k_proj.weight"
    changes = {
        "missing": {key: value for key, value in collected.items() if key != name},
        "extra": collected | {"model.layers.9.self_attn.k_proj.weight": collected[name]},
        "shape": collected | {name: collected[name][:-1]},
    }
    messages = {}
    for case, weights in changes.items():
        engine.sync_weights(actor, version=1)
        with pytest.raises(ValueError) as error:
            engine.receive(iter(weights.items()), version=2)
        with pytest.raises(RuntimeError, match="no valid weights"):
            engine.generate(PROMPTS, samples=1, sampling=SAMPLING)
        messages[case] = str(error.value)
    # A failed update must not leave weights that the next one would count as loaded.
    engine.sync_weights(actor, version=3)
    _compare_logprobs(actor, engine, 3)
    # Two swapped matrices of equal shape pass every other check.
    from megatron_rl.rollouts.behavior import check_engine

    assert (
        check_engine(actor, engine, PROMPTS, temperature=1.0, seed=1, tokens_per_micro_batch=256)
        < 1e-5
    )
    other = name.replace("layers.1", "layers.0")
    swapped = collected | {name: collected[other], other: collected[name]}
    engine.receive(iter(swapped.items()), version=3)
    with pytest.raises(RuntimeError, match="differ from the actor's by"):
        check_engine(actor, engine, PROMPTS, temperature=1.0, seed=1, tokens_per_micro_batch=256)
    engine.sync_weights(actor, version=3)
    messages["vllm"] = _push_into_a_new_vllm(actor, engine)
    engine.sync_weights(actor, version=3)
    # A request that is still running.
    from vllm import SamplingParams

    core = engine._llm.llm_engine
    core.add_request("running", {"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="the engine is generating"):
        engine.sync_weights(actor, version=4)
    core.abort_request(["running"])
    # An exception in the middle of a call must not leave requests for the next call.
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, samples=2, sampling=SAMPLING, on_progress=lambda *progress: 1 // 0)
    _compare_logprobs(actor, engine, 3)
    # A call that takes too long leaves an engine that works.
    _limit(engine, seconds=0.0)
    with pytest.raises(TimeoutError, match=r"0 of 5 responses .* none in the last 0 s"):
        engine.generate(PROMPTS, samples=1, sampling=SAMPLING)
    _limit(engine, seconds=600.0)
    _compare_logprobs(actor, engine, 3)
    return json.dumps(messages)


def test_sync_of_invalid_weights_raises_and_engine_recovers(tmp_path):
    _save_model(tmp_path, tied=False)
    messages = json.loads(run_ranks(_break_syncs, 1, str(tmp_path))[0])
    name = "model.layers.1.self_attn.k_proj.weight"
    assert messages["missing"] == f"weights were not received: ['{name}']"
    assert messages["extra"].startswith(
        "model.layers.9.self_attn.k_proj.weight was received twice or"
    )
    assert messages["vllm"] == (
        "weight sync 4, actor tp1 to vLLM tp1 x 1 engines: vLLM's parameters differ from "
        "those expected: model.norm.weight (128,) is not expected; model.scale (128,) does not "
        "exist"
    )
    assert messages["shape"] == f"{name} has shape (63, 128), expected (64, 128)"


def _generate_with_late_ranks(rank, world_size, folder):
    """Run one engine of two ranks: first one rank times out, then one of them never joins."""
    from megatron_rl.engine import requests

    actor = _actor(folder, (1, 1, 1, 2))
    engine = _engine(folder, 2, actor.topology)
    engine.sync_weights(actor, version=0)
    _limit(engine, seconds=0.0 if rank == 1 else 600.0)
    with pytest.raises(TimeoutError):  # on both, or the other would wait in the next step
        engine.generate(PROMPTS, samples=1, sampling=SAMPLING)
    _limit(engine, seconds=600.0)
    _compare_logprobs(actor, engine, 0)
    output = Path(folder) / "stderr"
    if rank == 0:
        requests.CLEAN_UP_SECONDS = 1.0
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 2)
        _limit(engine, seconds=1.0)
        engine.generate(PROMPTS, samples=1, sampling=SAMPLING)
        raise AssertionError("generated without the other rank")
    deadline = time.monotonic() + 60
    while not (output.exists() and "hangs or died" in output.read_text()):
        assert time.monotonic() < deadline, "rank 0 waits forever"
        time.sleep(0.1)
    raise AssertionError("rank 0 has given up")


def test_late_engine_raises_and_stuck_engine_exits_with_message(tmp_path):
    _save_model(tmp_path)
    with pytest.raises(AssertionError, match="rank 0 has given up"):
        run_ranks(_generate_with_late_ranks, 2, str(tmp_path))
    message = "rank 0: an engine step did not return, and no response finished for "
    assert message in (tmp_path / "stderr").read_text()
