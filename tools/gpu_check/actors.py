"""Actor checks on this device: against transformers, updates, and both kinds of layers."""

import importlib
import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch

from tools.gpu_check.numerics import one_process
from tools.gpu_check.row import DEVICE, LOW, Skipped, timed

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "Qwen2": {"tie_word_embeddings": True},
    "Llama": {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    "Qwen3": {"head_dim": 64, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    "Qwen3Moe": {"head_dim": 64, **EXPERTS},
}


def _save_model(folder, name):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    transformers.AutoModelForCausalLM.from_config(config, dtype=LOW).save_pretrained(folder)


def _rollouts():
    from megatron_rl.types import GradeResult, Prompt, Response, Rollout

    generator = torch.Generator().manual_seed(1)
    for index in range(8):
        tokens = tuple(torch.randint(0, 1000, (40 + 60 * index,), generator=generator).tolist())
        response = Response(
            index // 4, index % 4, tokens[8:], (0.0,) * (len(tokens) - 8), "", "stop", 0
        )
        yield Rollout(
            Prompt(index // 4, (), tokens[:8], "", ""), response, GradeResult(0.0, "", None)
        )


def _groups():
    """Yield two groups of eight responses behind long prompts."""
    from megatron_rl.types import GradeResult, Prompt, Response, Rollout

    generator = torch.Generator().manual_seed(2)
    of_prompt, of_response = (1024, 128) if DEVICE == "cuda" else (96, 16)

    def draw(count):
        return torch.randint(0, 1000, (count,), generator=generator).tolist()

    for group in range(2):
        prompt = Prompt(group, (), tuple(draw(of_prompt)), "", "")
        for sample in range(8):
            tokens = draw(of_response)
            response = Response(
                group, sample, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "",
                "stop", 0,
            )  # fmt: skip
            yield Rollout(prompt, response, GradeResult(0.0, "", None))


def _settings(**chosen):
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection

    optimizer = OptimizerSection(learning_rate=1e-4)
    return ActorSettings(optimizer=optimizer, warmup_updates=0, dtype=LOW, **chosen)


def _build(folder, *, rollouts=_rollouts, transformer_engine=False, **further):
    """Build an actor in low precision and a minibatch; return both with log-probs by rollout."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches

    topology, rows = one_process(), list(rollouts())
    settings = _settings(transformer_engine=transformer_engine, **further)
    actor = MegatronActor(folder, topology=topology, settings=settings)
    torch.manual_seed(0)
    minibatch = plan_minibatches(
        rows,
        torch.randn(len(rows)),
        minibatches=1,
        tokens_per_micro_batch=2048,
        topology=topology,
        gemm_tokens=settings.gemm_tokens,
        sharing=actor.sharing,
    )[0]
    packs = minibatch.micro_batches
    logprobs = actor.compute_logprobs(packs)
    for pack, behavior in zip(packs, logprobs, strict=True):
        pack.behavior_logprobs = behavior
    rows = gather_by_rollout(packs, logprobs, count=len(rows), topology=topology)
    return actor, minibatch, rows


def check_parity(row):
    """Compare log-probs of every architecture in bfloat16 with those of transformers."""
    from transformers import AutoModelForCausalLM

    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder, name)
            rows = _build(folder)[2]
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=LOW).to(DEVICE)
        gaps = []
        for rollout, mine in zip(_rollouts(), rows, strict=True):
            tokens = [*rollout.prompt.token_ids, *rollout.response.token_ids]
            text = torch.tensor([tokens], device=DEVICE)
            with torch.no_grad():
                plain = model(text).logits[0, :-1].float().log_softmax(-1)
            plain = plain.gather(1, text[0, 1:, None]).squeeze(1)[-len(mine) :]
            gaps.append((plain.cpu() - torch.from_numpy(mine)).abs().mean().item())
        row.at_most(f"{name} mean gap", max(gaps), 2e-2)


def check_update(row):
    """Check that the first ratio is exactly 1, and that sleep and checkpoints preserve updates."""
    from megatron_rl.actor.memory import training_state_bytes
    from megatron_rl.objectives import build_objective

    objective = build_objective("grpo")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        _save_model(model, "Qwen2")
        actor, minibatch, _ = _build(model)
        first = actor.update(minibatch, objective)
        deviation = first.statistics.to_metrics()["ratio/max_deviation"]
        row.at_most("first ratio - 1", deviation, 0.0)
        held = training_state_bytes(actor.ddp_chunks, actor.optimizer)
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        actor.sleep()
        if DEVICE == "cuda":
            kept = held - (before - torch.cuda.memory_allocated())
            row.at_most("training state left on the device asleep", kept / held, 0.05)
        actor.save(Path(folder) / "checkpoint")
        norms = [actor.update(minibatch, objective).grad_norm]
        actor.load(Path(folder) / "checkpoint")
        norms.append(actor.update(minibatch, objective).grad_norm)
        gap = abs(norms[1] - norms[0]) / norms[0]
        # Atomic sums on a GPU may differ between runs; CPU results must be identical.
        row.at_most("update after loading", gap, 1e-3 if DEVICE == "cuda" else 0.0)


def _transformer_engine():
    """Return Transformer Engine's version; raise Skipped if its layers cannot run."""
    if DEVICE == "cpu":
        raise Skipped("Transformer Engine needs a CUDA device")
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("Transformer Engine is not installed: the actor uses Megatron's local layers")
    return importlib.import_module("transformer_engine").__version__


def _against_local_layers(row, names, *, logprob_bound, norm_bound, **settings):
    """Compare log-probs and one update of both kinds of layers on packs of several sequences."""
    from megatron_rl.objectives import build_objective

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder, name)
            actors = [_build(folder), _build(folder, transformer_engine=True, **settings)]
        logprobs = [each for _, _, each in actors]
        gap = max(abs(a - b).mean() for a, b in zip(*logprobs, strict=True))
        row.at_most(f"{name} mean gap", float(gap), logprob_bound)
        results = [actor.update(batch, build_objective("grpo")) for actor, batch, _ in actors]
        norm, other_norm = (result.grad_norm for result in results)
        change = abs(other_norm - norm) / norm
        row.at_most(f"{name} gradient norm's change", change, norm_bound)
        deviation = results[1].statistics.to_metrics()["ratio/max_deviation"]
        row.at_most(f"{name} first ratio - 1", deviation, 0.0)


def check_transformer_engine(row):
    """Compare Transformer Engine's layers and THD attention with the local layers."""
    version = _transformer_engine()
    row.note("version", version)
    _against_local_layers(row, MODELS, logprob_bound=2e-2, norm_bound=5e-2)


def check_shared_prompts(row):
    """Compare packs that compute each prompt once with whole sequences, on both kinds of layers."""
    from megatron_rl.objectives import build_objective

    kinds = [("local layers", False)]
    try:
        _transformer_engine()
        kinds.append(("Transformer Engine", True))
    except Skipped as reason:
        row.note("without", str(reason))
    objective = build_objective("grpo")
    for kind, on_te in kinds:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder, "Qwen3")
            both = [
                _build(folder, rollouts=_groups, transformer_engine=on_te, share_prompts=one)
                for one in (False, True)
            ]
        gap = max(abs(a - b).mean() for a, b in zip(both[0][2], both[1][2], strict=True))
        row.at_most(f"{kind}: mean gap", float(gap), 2e-2)
        results = [actor.update(batch, objective) for actor, batch, _ in both]
        norm, other = (result.grad_norm for result in results)
        row.at_most(f"{kind}: gradient norm's change", abs(other - norm) / norm, 5e-2)
        deviation = results[1].statistics.to_metrics()["ratio/max_deviation"]
        row.at_most(f"{kind}: first ratio - 1", deviation, 0.0)
        whole, once = (
            min(timed(actor.update, batch, objective) for _ in range(3)) for actor, batch, _ in both
        )
        row.note(f"{kind}: times as fast", whole / once)


def check_critic(row):
    """Check that a sleeping critic leaves the device, and that its values are the same after it."""
    from megatron_rl.actor.critic import Critic
    from megatron_rl.data.packing import plan_minibatches, scatter_to_packs
    from megatron_rl.objectives.values import GaeSettings

    topology, rollouts = one_process(), list(_rollouts())
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder) / "model", "Qwen2")
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        critic = Critic(Path(folder) / "model", topology=topology, settings=_settings())
        (minibatch,) = plan_minibatches(
            rollouts, torch.ones(8), minibatches=1, tokens_per_micro_batch=2048, topology=topology
        )
        packs = minibatch.micro_batches
        rewards = scatter_to_packs(
            packs, [np.ones(len(r.response.rollout_logprobs), np.float32) for r in rollouts]
        )
        cut = [torch.zeros(len(pack.rollout_indices), dtype=torch.bool) for pack in packs]
        settings = GaeSettings(1.0, 0.95, 1.0)

        def score():
            ends = [pack.response_mask for pack in packs]
            return critic.compute_targets(packs, rewards, ends, cut, settings=settings)

        for pack, one in zip(packs, score(), strict=True):
            pack.values, pack.returns = one[:, 0], one[:, 2]
        critic.update(minibatch, clip=0.2)
        for pack in packs:
            pack.values = None  # else those would be taken
        awake, digest = score(), critic.digest()
        held = (torch.cuda.memory_allocated() if DEVICE == "cuda" else 1) - before
        critic.sleep()
        if DEVICE == "cuda":
            kept = torch.cuda.memory_allocated() - before
            row.at_most("critic left on the device asleep", kept / held, 0.1)
        critic.save(Path(folder) / "checkpoint")
        row.at_most("checksums that sleep changes", float(critic.digest() != digest), 0.0)
        critic.wake_up()
        again = score()
        gap = max(float((a - b).abs().max()) for a, b in zip(awake, again, strict=True))
        row.at_most("values after sleep", gap, 0.0)
        for pack, one in zip(packs, again, strict=True):
            pack.values = one[:, 0]
        critic.update(minibatch, clip=0.2)


def require_fp8():
    """Raise Skipped if this machine cannot run fp8 matrix products."""
    _transformer_engine()
    if torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("this device does not support fp8 (needs compute capability 8.9 or above)")


def check_fp8(row):
    """Compare fp8 matrix products, scaled per tensor, with the local layers."""
    require_fp8()
    names = [name for name in MODELS if "num_experts" not in MODELS[name]]
    _against_local_layers(row, names, logprob_bound=1e-1, norm_bound=2e-1, fp8="tensorwise")
