"""LoRA on each kind of architecture: log-probs, gradients, merged push and export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import MODELS, _make_model
from tests.functional.test_actor_layouts import make_model, make_rollouts, plan
from tests.functional.test_lora import close, push, score, settings
from tests.ranks import run_ranks

# Latent attention has no qkv; adapters of experts, one for each, have no module in transformers.
TARGETS = {
    "qwen2": ("qkv", "proj", "fc1", "fc2"),
    "gemma3": ("qkv", "proj", "fc1", "fc2"),
    "glm4_moe": ("qkv", "proj"),
    "deepseek_v3": ("proj",),
}


def differentiate(rank, world_size, root):
    """Write adapters with random factors and, as another folder, their gradients; log-probs."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.adapter_files import export_adapters
    from megatron_rl.actor.cpu_adaptation import megatron_runtime
    from megatron_rl.actor.groups import initialise
    from megatron_rl.actor.lora import without_adapters

    topology, scores = initialise(), {}
    for name, targets in TARGETS.items():
        folder = root / name
        chosen = replace(settings(), lora=settings().lora.model_copy(update={"targets": targets}))
        actor = MegatronActor(folder / "model", topology=topology, settings=chosen)
        (minibatch,) = plan(actor, *make_rollouts(), minibatches=1, tokens=240)
        packs = minibatch.micro_batches
        start = actor.compute_logprobs(packs)
        with without_adapters(actor.chunks):
            assert all(map(torch.equal, start, actor.compute_logprobs(packs))), "B = 0 adds bits"
        full = replace(chosen, lora=None)
        plain = MegatronActor(folder / "model", topology=topology, settings=full)
        for base, want in zip(start, plain.compute_logprobs(packs), strict=True):
            # Megatron computes products of frozen weights by another function.
            atol = 1e-5 if name == "deepseek_v3" else 0
            torch.testing.assert_close(base, want, rtol=0, atol=atol)
        generator = torch.Generator().manual_seed(9)
        factors = {key: value for key, value in actor.tensors().items() if "lora" in key}
        for value in factors.values():
            value.data.normal_(0, 0.2, generator=generator)
        scores[name] = score(actor, minibatch)
        export_adapters(actor, folder / "adapter")
        actor.export_hf(folder / "merged")
        push(actor, load_file(folder / "merged" / "model.safetensors"))
        with megatron_runtime():
            for batch in packs:
                pack = actor.packs.prepare(batch)
                (logprobs,) = actor.chunks[0](pack.inputs)
                (logprobs * pack.spread(batch.advantages)).sum().backward()
        for value in factors.values():
            value.data.copy_(value.main_grad)
        export_adapters(actor, folder / "gradients")
    return scores


@pytest.fixture(scope="module")
def differentiated(tmp_path_factory):
    root = tmp_path_factory.mktemp("differentiated")
    for name in TARGETS:
        if name == "qwen2":
            make_model(root / name / "model", tied=True)
        else:
            _make_model(root / name / "model", *MODELS[name])
    return root, run_ranks(differentiate, 1, root)[0]


def sum_weighted(model):
    """Log-probs of the responses under a transformers model, and their weighted sum."""
    rollouts, advantages = make_rollouts()
    rows, total = [], 0.0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        text = torch.tensor([[*rollout.prompt.token_ids, *rollout.response.token_ids]])
        logprobs = model(text).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, text[0, 1:, None])[-len(rollout.response.token_ids) :, 0]
        rows.append(picked.tolist())
        total = total + advantage * picked.sum()
    return rows, total


def compare_gradients(factors, root):
    """The factors' gradients; modules that share an A here have the sum of its gradients."""
    wanted = load_file(root / "gradients" / "adapter_model.safetensors")
    assert wanted.keys() == factors.keys()
    shared = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    sums = {}
    for name, factor in factors.items():
        layer, _, projection = name.partition("_proj.")[0].rpartition(".")
        group = (layer, shared.get(projection, projection), name.split(".lora_")[1])
        key = group if "lora_A" in name else name
        sums[key] = sums.get(key, 0) + factor.grad
        factor.group = key
    for name, factor in factors.items():
        got = sums[factor.group]
        assert got.abs().max() > 1e-2
        torch.testing.assert_close(wanted[name], got, rtol=1e-3, atol=1e-4 * float(got.abs().max()))


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_of_an_architecture_are_those_of_the_definition(differentiated, name):
    """Hooks on transformers add alpha / r B A x; the export has W + alpha / r B A."""
    from transformers import AutoModelForCausalLM

    root, scores = differentiated
    root = root / name
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    about = json.loads((root / "adapter" / "adapter_config.json").read_text())
    scale = about["lora_alpha"] / about["r"]
    factors = load_file(root / "adapter" / "adapter_model.safetensors")
    merged = load_file(root / "merged" / "model.safetensors")
    base = load_file(root / "model" / "model.safetensors")
    factors = {key: factor.requires_grad_() for key, factor in factors.items()}
    for module_name, module in model.named_modules():
        stem = f"base_model.model.{module_name}."
        if f"{stem}lora_A.weight" in factors:
            a, b = (factors[f"{stem}lora_{letter}.weight"] for letter in "AB")
            update = (scale * b @ a).detach()
            key = f"{module_name}.weight"
            torch.testing.assert_close(merged.pop(key), base[key] + update, rtol=0, atol=1e-6)
            module.register_forward_hook(
                lambda _, inputs, out, a=a, b=b: out + scale * inputs[0] @ a.t() @ b.t()
            )
    assert len(base) - len(merged) == len(factors) // 2 > 0
    assert all(torch.equal(value, base[key]) for key, value in merged.items())
    rows, total = sum_weighted(model)
    total.backward()
    close(rows, scores[name])
    compare_gradients(factors, root)


def test_peft_reads_the_folder(differentiated):
    import peft
    from transformers import AutoModelForCausalLM

    root, scores = differentiated
    root, scores = root / "qwen2", scores["qwen2"]
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True)
    rows, total = sum_weighted(model)
    total.backward()
    close(rows, scores)
    factors = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora" in n}
    compare_gradients(factors, root)
