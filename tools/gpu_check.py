"""Every CUDA-only path once, small: NCCL, objective, head, attention, bf16 actors, sleep,
and the actor on Transformer Engine's layers where it is installed.

    bash tools/gpu_check.sh

Prints one row per check with what was measured against which bound; exits 1 if any fails. Without
a CUDA device the same checks run on the CPU, which proves the script and nothing about a GPU;
those that only a GPU can answer are skipped there, and say so.
"""

import importlib
import importlib.util
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16


class Skipped(Exception):  # noqa: N818 - nothing is wrong
    """This machine cannot answer; the message says what it lacks."""


def _require(value, bound, what):
    if not value <= bound:
        raise AssertionError(f"{what} is {value:.3g}, above {bound:g}")
    return f"{what} {value:.3g} (bound {bound:g})"


def check_machine():
    """Device, torch and what is installed beside it."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU: no CUDA device"
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def check_groups():
    """Megatron's process groups of one, with a collective on each."""
    from megatron_rl.actor import groups

    topology = groups.initialise()
    one = torch.ones(1, device=topology.device)
    for group in (topology.tp_group, topology.cp_group, topology.pp_group, topology.dp_cp_group):
        torch.distributed.all_reduce(one, group=group)
    return f"{torch.distributed.get_backend()}: sum over groups of one = {one.item():g}"


def check_head():
    """Tiled log-probs in low precision against float32 log_softmax of the same logits."""
    from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs

    torch.manual_seed(0)
    vocab, size = 32_000, 256
    hidden = torch.randn(512, size, device=DEVICE, dtype=LOW, requires_grad=True)
    weight = (torch.randn(vocab, size, device=DEVICE, dtype=LOW) * 0.05).requires_grad_()
    labels = torch.randint(0, vocab, (512,), device=DEVICE)
    mine, _ = token_logprobs(hidden, weight, labels, shard=VocabShard(0, vocab))
    logits = hidden.float() @ weight.float().t()
    plain = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    error = _require((mine - plain).abs().max().item(), 1e-3, "log-prob error")
    got = torch.autograd.grad(mine.sum(), (hidden, weight))
    want = torch.autograd.grad(plain.sum(), (hidden, weight))
    gap = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
    return error + "; " + _require(gap, 2e-2, "gradient error")


def check_objective():
    """PNPO's loss and gradient here against the same on the CPU."""
    from megatron_rl.objectives import policy_loss

    torch.manual_seed(0)
    behavior = -torch.rand(16, 2000)
    policy = behavior + 1e-3 * torch.randn_like(behavior)
    mask, advantages = torch.rand_like(behavior) < 0.9, torch.linspace(-1, 1, 16)
    results = []
    for device in (DEVICE, "cpu"):
        there = policy.to(device).requires_grad_()
        loss, _ = policy_loss(
            "pnpo",
            policy_logprobs=there,
            behavior_logprobs=behavior.to(device),
            advantages=advantages.to(device),
            response_mask=mask.to(device),
        )
        results.append((loss.item(), torch.autograd.grad(loss, there)[0].cpu()))
    (loss, gradient), (wanted_loss, wanted) = results
    error = _require(abs(loss - wanted_loss), 1e-5, "loss error")
    gap = ((gradient - wanted).norm() / wanted.norm()).item()
    return error + "; " + _require(gap, 1e-4, "gradient error")


def _attention_inputs(lengths, dtype, heads=(8, 2, 2), size=64):
    total = sum(lengths)
    return [
        torch.randn(total, count, size, device=DEVICE, dtype=dtype, requires_grad=True)
        for count in heads
    ]


def _attend(lengths, inputs):
    from megatron_rl.distributed.attention_plan import build_attention_plan
    from megatron_rl.distributed.context_attention import context_attention
    from megatron_rl.distributed.sequence_layout import SequenceLayout

    mask = torch.ones(sum(lengths), dtype=torch.bool, device=DEVICE)
    plan = build_attention_plan(SequenceLayout(lengths, mask), fused=True)
    return context_attention(*inputs, plan=plan, group=None)


def check_attention():
    """Packed attention against plain attention, sequence by sequence, in both dtypes."""
    lengths = (1024, 96, 2048, 512)
    said = []
    for dtype, output_bound, gradient_bound in ((LOW, 3e-2, 2e-2), (torch.float32, 1e-3, 1e-3)):
        torch.manual_seed(0)
        inputs = _attention_inputs(lengths, dtype)
        mine = _attend(lengths, inputs)
        parts = []
        for sequence in zip(*(x.split(lengths) for x in inputs), strict=True):
            q, k, v = (x.transpose(0, 1).float()[None] for x in sequence)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        plain = torch.cat(parts)
        name = str(dtype)[6:]
        error = (mine.float() - plain).abs().max().item()
        said.append(_require(error, output_bound, f"{name} output error"))
        weights = torch.randn_like(plain)
        got = torch.autograd.grad((mine.float() * weights).sum(), inputs)
        want = torch.autograd.grad((plain * weights).sum(), inputs)
        gap = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
        said.append(_require(gap, gradient_bound, "gradient error"))
    return "; ".join(said)


def check_chunks():
    """What a context-parallel rank attends: chunks of queries that end before the last key."""
    from megatron_rl.distributed.context_attention import attend_fused

    said = []
    for dtype, bound in ((LOW, 3e-2), (torch.float32, 1e-3)):
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(1, heads, tokens, 64, device=DEVICE, dtype=dtype)
            for heads, tokens in ((8, 512), (2, 1536), (2, 1536))
        )
        mine = attend_fused(query, key, value)
        places = torch.arange(1024, 1536, device=DEVICE)[:, None]
        seen = torch.arange(1536, device=DEVICE) <= places
        wide = (x.float() for x in (query, key, value))
        plain = F.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
        error = (mine.float() - plain).abs().max().item()
        said.append(_require(error, bound, f"{str(dtype)[6:]} output error"))
    return "; ".join(said)


def check_memory():
    """Peak memory of attention, forward and backward: twice the tokens take twice the memory."""
    if DEVICE == "cpu":
        raise Skipped("memory is measured on CUDA")
    said = []
    for dtype in (LOW, torch.float32):
        peaks = []
        for tokens in (8192, 16384):
            inputs = _attention_inputs((tokens,), dtype, heads=(12, 2, 2), size=128)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            _attend((tokens,), inputs).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        ratio = _require(peaks[1] / peaks[0], 2.2, f"{str(dtype)[6:]} growth from 8k to 16k tokens")
        said.append(f"{ratio}, {peaks[1] / 2**20:.0f} MiB")
    return "; ".join(said)


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
    from megatron_rl.types import Prompt, Response, Rollout, Verdict

    generator = torch.Generator().manual_seed(1)
    for index in range(8):
        tokens = tuple(torch.randint(0, 1000, (40 + 60 * index,), generator=generator).tolist())
        response = Response(
            index // 4, index % 4, tokens[8:], (0.0,) * (len(tokens) - 8), "", "stop", 0
        )
        yield Rollout(Prompt(index // 4, (), tokens[:8], "", ""), response, Verdict(0.0, "", None))


def _build(folder, *, transformer_engine=False, fp8=None):
    """An actor in low precision, a minibatch, and its log-probs by rollout."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches

    topology = groups.topology_now()
    settings = ActorSettings(
        learning_rate=1e-4,
        warmup_updates=0,
        dtype=LOW,
        transformer_engine=transformer_engine,
        fp8=fp8,
    )
    actor = MegatronActor(folder, topology=topology, settings=settings)
    torch.manual_seed(0)
    minibatch = plan_minibatches(
        list(_rollouts()),
        torch.randn(8),
        minibatches=1,
        tokens_per_micro_batch=2048,
        topology=topology,
        sequence_parallel=False,
        gemm_tokens=settings.gemm_tokens,
    )[0]
    packs = minibatch.micro_batches
    logprobs = actor.compute_logprobs(packs)
    for pack, behavior in zip(packs, logprobs, strict=True):
        pack.behavior_logprobs = behavior
    return actor, minibatch, gather_by_rollout(packs, logprobs, count=8, topology=topology)


def check_parity():
    """Log-probs of every architecture in bfloat16 against transformers' in bfloat16."""
    from transformers import AutoModelForCausalLM

    said = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder, name)
            rows = _build(folder)[2]
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=LOW).to(DEVICE)
        gaps = []
        for rollout, row in zip(_rollouts(), rows, strict=True):
            tokens = [*rollout.prompt.token_ids, *rollout.response.token_ids]
            text = torch.tensor([tokens], device=DEVICE)
            with torch.no_grad():
                plain = model(text).logits[0, :-1].float().log_softmax(-1)
            plain = plain.gather(1, text[0, 1:, None]).squeeze(1)[-len(row) :]
            gaps.append((plain.cpu() - torch.from_numpy(row)).abs().mean().item())
        said.append(_require(max(gaps), 2e-2, f"{name} mean gap"))
    return "; ".join(said)


def check_update():
    """A first ratio of exactly 1, sleep between updates, and a checkpoint that repeats one."""
    from megatron_rl.actor.memory import training_state_bytes
    from megatron_rl.objectives import build_objective

    objective = build_objective("grpo")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        _save_model(model, "Qwen2")
        actor, minibatch, _ = _build(model)
        first = actor.update(minibatch, objective)
        deviation = first.statistics.to_metrics()["ratio/max_deviation"]
        said = [_require(deviation, 0.0, "first ratio - 1")]
        held = training_state_bytes(actor.wrapped, actor.optimizer)
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        actor.sleep()
        if DEVICE == "cuda":
            kept = held - (before - torch.cuda.memory_allocated())
            said.append(_require(kept / held, 0.05, "training state left on the device asleep"))
        actor.save(Path(folder) / "checkpoint")
        norms = [actor.update(minibatch, objective).grad_norm]
        actor.load(Path(folder) / "checkpoint")
        norms.append(actor.update(minibatch, objective).grad_norm)
        gap = abs(norms[1] - norms[0]) / norms[0]
        # Atomic sums on a GPU may differ between two runs; nothing may differ on a CPU.
        said.append(_require(gap, 1e-3 if DEVICE == "cuda" else 0.0, "update after loading"))
    return "; ".join(said)


def _transformer_engine():
    """Transformer Engine's version, or Skipped where its layers cannot run."""
    if DEVICE == "cpu":
        raise Skipped("Transformer Engine needs a CUDA device")
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("Transformer Engine is absent: the actor runs on Megatron's local layers")
    return importlib.import_module("transformer_engine").__version__


def _against_local_layers(names, *, logprob_bound, norm_bound, **settings):
    """Log-probs and one update of both kinds of layers; the packs hold several sequences."""
    from megatron_rl.objectives import build_objective

    said = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(folder, name)
            actors = [_build(folder), _build(folder, transformer_engine=True, **settings)]
        rows = [rows for _, _, rows in actors]
        gap = max(abs(a - b).mean() for a, b in zip(*rows, strict=True))
        said.append(_require(float(gap), logprob_bound, f"{name} mean gap"))
        results = [actor.update(batch, build_objective("grpo")) for actor, batch, _ in actors]
        norm, other_norm = (result.grad_norm for result in results)
        change = abs(other_norm - norm) / norm
        said.append(_require(change, norm_bound, "gradient norm's change"))
        deviation = results[1].statistics.to_metrics()["ratio/max_deviation"]
        said.append(_require(deviation, 0.0, "first ratio - 1"))
    return "; ".join(said)


def check_transformer_engine():
    """Transformer Engine's layers and THD attention against the local ones, all architectures."""
    version = _transformer_engine()
    said = _against_local_layers(MODELS, logprob_bound=2e-2, norm_bound=5e-2)
    return f"version {version}; {said}"


def check_fp8():
    """The same with matrix products in fp8, scaled by tensor."""
    _transformer_engine()
    if torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("this device has no fp8 (compute capability 8.9 or above)")
    names = [name for name in MODELS if "num_experts" not in MODELS[name]]
    return _against_local_layers(names, logprob_bound=1e-1, norm_bound=2e-1, fp8="tensorwise")


CHECKS = (
    check_machine,
    check_groups,
    check_objective,
    check_head,
    check_attention,
    check_chunks,
    check_memory,
    check_parity,
    check_update,
    check_transformer_engine,
    check_fp8,
)


def main():
    """Run the checks in order and print the table."""
    failed = False
    print(f"{'check':<10} {'status':<8} {'seconds':>7}  measured")
    for check in CHECKS:
        start = time.monotonic()
        try:
            status, detail = "ok", check()
        except Skipped as reason:
            status, detail = "skipped", str(reason)
        except Exception as error:  # noqa: BLE001 - a failing check is a row; the others still run
            status, detail, failed = "FAILED", f"{type(error).__name__}: {error}", True
            traceback.print_exc()
        name, seconds = check.__name__.removeprefix("check_"), time.monotonic() - start
        print(f"{name:<10} {status:<8} {seconds:>7.1f}  {detail}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
