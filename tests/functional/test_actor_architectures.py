"""Every architecture against transformers, alone and under layouts that split what it has."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.models.shape import read_model_shape
from tests.functional.test_actor_layouts import (
    VOCAB,
    freeze_behavior,
    lengthen_prompts,
    make_rollouts,
    plan,
    randomise,
    transformers_logprobs,
)
from tests.published_form import load_model, publish
from tests.ranks import run_ranks

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 12,  # not hidden size / heads
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "decoder_sparse_step": 1,
}
# Sequences are up to 49 tokens long: most positions lie beyond the original maximum.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Two of four groups of two experts; the first of four layers is dense.
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # as transformers writes it: the rotated part
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}
# Each stage has a gated delta net; the second layer and the last one have attention.
HYBRID = {
    "head_dim": 16,
    "rms_norm_eps": 1e-3,  # otherwise transformers itself is 6e-5 from float64
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
}
HYBRID_EXPERTS = {
    **{key: value for key, value in EXPERTS.items() if key != "decoder_sparse_step"},
    "shared_expert_intermediate_size": 28,
}
MODELS = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    # Sequences of up to 49 tokens: an error of one token in the window changes the log-probs.
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    # Windows in layers of both stages, at other places than in the stage before.
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
            "query_pre_attn_scalar": 20,
            "pad_token_id": None,  # torch has no gradient for the embedding of a padding token
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    # Its experts are whole on a rank, so it needs a layout of its own.
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "sliding_window": 5,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    # Its routing is not normalised over the chosen experts.
    # vLLM's class has heads of hidden size / heads only.
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 28, "head_dim": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        # The first pipeline stage has no experts; latents are normalised with another epsilon.
        {**GROUPED, **LATENT, "first_k_dense_replace": 2, "rms_norm_eps": 1e-3},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**HYBRID, **HYBRID_EXPERTS, "norm_topk_prob": True}),
    "qwen3_5": ("Qwen3_5TextConfig", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **HYBRID_EXPERTS}),
    "glm4_moe": ("Glm4MoeConfig", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
}


def _make_model(folder, config_class, extra):
    import transformers

    torch.manual_seed(7)
    extra = {**SIZES, **extra}
    config = getattr(transformers, config_class)(**extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder)


def _score(rank, world_size, root, layout, names):
    """Log-probs by rollout and an export of every model; one update must stay finite."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.objectives import build_objective

    topology = groups.initialise(**layout)
    rollouts, advantages = make_rollouts()
    report = {}
    for name in names:
        settings = ActorSettings(
            optimizer=OptimizerSection(learning_rate=1e-3),
            warmup_updates=0,
            recompute="selective" if layout == {"expert": 2} else "full",
            overlap_reduction=world_size > 1,
        )
        actor = MegatronActor(Path(root) / name, topology=topology, settings=settings)
        tokens = 480 // (topology.pp_size * topology.dp_size)  # a pack for each stage
        (minibatch,) = plan(actor, rollouts, advantages, minibatches=1, tokens=tokens)
        packs = freeze_behavior(actor, [minibatch])
        logprobs = [pack.behavior_logprobs for pack in packs]
        rows = gather_by_rollout(packs, logprobs, count=len(rollouts), topology=topology)
        report[name] = [row.tolist() for row in rows]
        actor.export_hf(Path(root) / f"{name}-exported-{world_size}")
        report[f"{name}/shared"] = _share(actor, tokens)
        result = actor.update(minibatch, build_objective("grpo"))
        report[f"{name}/deviation"] = result.statistics.to_metrics()["ratio/max_deviation"]
        report[f"{name}/grad_norm"] = result.grad_norm
        if world_size == 1 or topology.pp_size > 1:
            report[f"{name}/one_pack"] = _update_by_one_pack(actor, rollouts, advantages)
    return json.dumps(report)


def _share(actor, tokens):
    """Log-probs, gradient and first ratio with and without common beginnings computed once.

    Returns the largest difference of log-probs, the relative difference of gradients (of their
    norms, where ranks have parts of the sum), the largest deviation of a first ratio from 1, and
    the rows of both.
    """
    from megatron_rl.data.packing import gather_by_rollout
    from megatron_rl.data.sharing import Sharing
    from megatron_rl.objectives import build_objective

    rollouts, advantages = lengthen_prompts(*make_rollouts())
    found, norms = [], []
    for sharing in (None, Sharing(1.0, always=True)):
        (minibatch,) = plan(
            actor, rollouts, advantages, minibatches=1, tokens=tokens, sharing=sharing
        )
        packs = freeze_behavior(actor, [minibatch])
        rows = gather_by_rollout(
            packs, [pack.behavior_logprobs for pack in packs], count=len(rollouts),
            topology=actor.topology,
        )  # fmt: skip
        # Stopped before the step: the weights stay, and the gradients are in the buffers.
        result = actor.update(minibatch, build_objective("grpo"), rule=lambda _: "gradients only")
        grads = torch.cat(
            [
                p.main_grad.flatten()
                for chunk in actor.chunks
                for p in chunk.parameters()
                if p.requires_grad
            ]
        )
        norms.append(result.grad_norm)
        found.append((
            np.concatenate(rows), grads.clone(),
            result.statistics.to_metrics()["ratio/max_deviation"],
            sum(len(pack.tokens) for pack in packs),
        ))  # fmt: skip
    (a, of_a, _, apart), (b, of_b, deviation, once) = found
    if actor.topology.dp_size * actor.topology.cp_size > 1:
        of_a, of_b = (torch.tensor(norm) for norm in norms)
    gap = float((of_a - of_b).norm() / of_a.norm())
    return [float(np.abs(a - b).max()), gap, deviation, apart, once]


def _update_by_one_pack(actor, rollouts, advantages):
    """The gradient's norm if every replica has one micro-batch, the same: fewer than stages.

    Everything is divided by the number of replicas, so layouts agree.
    """
    from megatron_rl.data.packing import build_pack
    from megatron_rl.objectives import build_objective
    from megatron_rl.types import Denominators, Minibatch

    alignment = actor.topology.alignment
    pack = build_pack(rollouts, advantages, indices=range(len(rollouts)), alignment=alignment)
    pack.advantages = pack.advantages / actor.topology.dp_size
    (pack.behavior_logprobs,) = actor.compute_logprobs([pack])
    minibatch = Minibatch([pack], Denominators(responses=16.0, tokens=300.0))
    return actor.update(minibatch, build_objective("grpo")).grad_norm


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    for name, (config_class, extra) in MODELS.items():
        _make_model(folder / name, config_class, extra)
    publish(folder / "qwen3_5_moe")
    return folder


@pytest.fixture(scope="module")
def reference(root):
    return json.loads(run_ranks(_score, 1, str(root), {}, list(MODELS))[0])


def _norm_by_transformers(folder):
    """The norm of the gradient of - sum_t A log p_t / sum_i L_i, which is GRPO's at ratio 1."""
    model = load_model(folder)
    rollouts, advantages = make_rollouts()
    count = sum(len(rollout.response.token_ids) for rollout in rollouts)
    for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
        length = len(rollout.response.token_ids)
        text = torch.tensor([[*rollout.prompt.token_ids, *rollout.response.token_ids]])
        logprobs = model(text).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, text[0, 1:, None])[-length:]
        (-advantage / count * picked.sum()).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).norm().item()


@pytest.mark.parametrize("name", MODELS)
def test_one_process_equals_transformers(root, reference, name):
    for mine, theirs in zip(reference[name], transformers_logprobs(root / name), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    want = _norm_by_transformers(root / name)
    assert reference[f"{name}/grad_norm"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_common_beginnings_change_nothing(reference, name):
    check_shared(reference[f"{name}/shared"])


def check_shared(report):
    """float32: measured up to 7e-6 and 2e-5, of delta nets; a wrong key or position gives 1e-2."""
    logprobs, gradients, deviation, apart, once = report
    assert logprobs < 3e-5 and gradients < 1e-4
    assert deviation == 0.0
    assert once < 0.7 * apart


FOUR = {"tensor": 2, "context": 2, "expert": 2}
SPLIT = ["mistral", "qwen2_moe", "qwen3_moe", "gemma3", "deepseek_v3", "qwen3_next", "qwen3_5_moe",
         "glm4_moe"]  # fmt: skip
# Windows, latents, sinks and states at other places in each stage.
STAGED = ["llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5"]
LAYOUTS = {
    "tp2-cp2-ep2": (FOUR, 4, SPLIT),
    "tp2-cp2-ep2-etp1": ({**FOUR, "expert_tensor": 1}, 4, ["gpt_oss"]),
    # Windows and states in stages whose sequences are split as well.
    "tp2-pp2-cp2-ep2": ({**FOUR, "pipeline": 2}, 8, ["gemma3", "qwen3_next"]),
    "dp2-ep2": ({"expert": 2}, 2, ["qwen3_moe", "gpt_oss", "qwen3_5_moe"]),
    "pp2-virtual2": ({"pipeline": 2, "virtual_stages": 2}, 2, STAGED),
}


SLOW = ("tp2-pp2-cp2-ep2", "tp2-cp2-ep2-etp1", "dp2-ep2")  # the parts of other cases


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in LAYOUTS]
)
def test_architectures_equal_transformers(root, reference, case):
    layout, world_size, names = LAYOUTS[case]
    report = json.loads(run_ranks(_score, world_size, str(root), layout, names)[0])
    for name in names:
        for mine, theirs in zip(report[name], transformers_logprobs(root / name), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
        assert report[f"{name}/deviation"] == 0.0, name
        check_shared(report[f"{name}/shared"])
        want = reference[f"{name}/grad_norm"]
        assert report[f"{name}/grad_norm"] == pytest.approx(want, rel=1e-5), name
        if "pipeline" in layout:
            want = reference[f"{name}/one_pack"]
            assert report[f"{name}/one_pack"] == pytest.approx(want, rel=1e-4), name
        folder = root / f"{name}-exported-{world_size}"
        assert read_model_shape(folder) == read_model_shape(root / name)  # its window, too
        source = load_file(root / name / "model.safetensors")
        exported = load_file(folder / "model.safetensors")
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in source.items())
