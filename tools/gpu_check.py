"""Every CUDA-only path once, small: bf16 parity, NCCL, fused head, attention, update, sleep.

    bash tools/gpu_check.sh

Prints one row per check with what was measured against which bound; exits 1 if any fails. Without
a CUDA device the same checks run on the CPU, which proves the script and nothing about a GPU.
"""

import importlib.util
import sys
import tempfile
import traceback

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def _require(value, bound, what):
    if not value <= bound:
        raise AssertionError(f"{what} is {value:.3g}, above {bound:g}")
    return f"{what} {value:.3g} (bound {bound:g})"


def check_machine():
    """Device, torch and what is installed beside it."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU: no CUDA device"
    engine = "with" if importlib.util.find_spec("transformer_engine") else "without"
    return f"{name}, torch {torch.__version__}, {engine} Transformer Engine"


def check_groups():
    """Megatron's process groups of one, with a collective on each."""
    from megatron_rl.actor import platform

    topology = platform.initialise()
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


def check_attention():
    """Packed attention against plain attention, sequence by sequence."""
    from megatron_rl.distributed.context_attention import build_attention_plan, context_attention
    from megatron_rl.distributed.sequence_layout import SequenceLayout

    torch.manual_seed(0)
    lengths = (1024, 96, 2048, 512)
    total = sum(lengths)
    layout = SequenceLayout(lengths, torch.ones(total, dtype=torch.bool, device=DEVICE))
    query, key, value = (
        torch.randn(total, heads, 64, device=DEVICE, dtype=LOW, requires_grad=True)
        for heads in (8, 2, 2)
    )
    mine = context_attention(query, key, value, plan=build_attention_plan(layout), group=None)
    parts = []
    for sequence in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1).float()[None] for x in sequence)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    plain = torch.cat(parts)
    error = _require((mine.float() - plain).abs().max().item(), 3e-2, "output error")
    weights = torch.randn_like(plain)
    got = torch.autograd.grad((mine.float() * weights).sum(), (query, key, value))
    want = torch.autograd.grad((plain * weights).sum(), (query, key, value))
    gap = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
    return error + "; " + _require(gap, 2e-2, "gradient error")


def _model(folder):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(LOW).save_pretrained(folder)


def _rollouts():
    from megatron_rl.types import Prompt, Response, Rollout, Verdict

    generator = torch.Generator().manual_seed(1)
    for index in range(8):
        tokens = tuple(torch.randint(0, 1000, (40 + 60 * index,), generator=generator).tolist())
        response = Response(
            index // 4, index % 4, tokens[8:], (0.0,) * (len(tokens) - 8), "", "stop", 0
        )
        yield Rollout(Prompt(index // 4, (), tokens[:8], "", ""), response, Verdict(0.0, "", None))


def check_actor():
    """Log-probs against transformers', a first ratio of exactly 1, an update, and sleep."""
    from transformers import AutoModelForCausalLM

    from megatron_rl.actor import platform
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
    from megatron_rl.objectives import build_objective

    topology = platform.topology_now()
    rollouts = list(_rollouts())
    with tempfile.TemporaryDirectory() as folder:
        _model(folder)
        settings = ActorSettings(learning_rate=1e-4, warmup_updates=0, dtype=LOW)
        actor = MegatronActor(folder, topology=topology, settings=settings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=LOW).to(DEVICE)
    minibatch = plan_minibatches(
        rollouts,
        torch.randn(8),
        minibatches=1,
        tokens_per_micro_batch=2048,
        topology=topology,
        sequence_parallel=False,
    )[0]
    packs = minibatch.micro_batches
    logprobs = actor.compute_logprobs(packs)
    gaps = []
    rows = gather_by_rollout(packs, logprobs, count=8, topology=topology)
    for rollout, row in zip(rollouts, rows, strict=True):
        tokens = [*rollout.prompt.token_ids, *rollout.response.token_ids]
        text = torch.tensor([tokens], device=DEVICE)
        with torch.no_grad():
            plain = model(text).logits[0, :-1].float().log_softmax(-1)
        plain = plain.gather(1, text[0, 1:, None]).squeeze(1)[-len(row) :]
        gaps.append((plain.cpu() - torch.from_numpy(row)).abs().mean().item())
    parity = _require(max(gaps), 2e-2, "mean log-prob gap")
    for pack, behavior in zip(packs, logprobs, strict=True):
        pack.behavior_logprobs = behavior
    actor.sleep()
    result = actor.update(minibatch, build_objective("pnpo"))
    deviation = result.statistics.to_metrics()["ratio/max_deviation"]
    return "; ".join((parity, _require(deviation, 0.0, "first ratio - 1"), "woke up and updated"))


def main():
    """Run the checks in order and print the table."""
    failed = False
    for check in (check_machine, check_groups, check_head, check_attention, check_actor):
        try:
            status, detail = "ok", check()
        except Exception as error:  # noqa: BLE001 - a failing check is a row; the others still run
            status, detail, failed = "FAILED", f"{type(error).__name__}: {error}", True
            traceback.print_exc()
        print(f"{check.__name__.removeprefix('check_'):<10} {status:<7} {detail}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
