"""Numerics on this device against plain torch."""

import torch
import torch.nn.functional as F

from tools.gpu_check.row import DEVICE, LOW, Skipped


def one_process():
    """Return the actor's process groups of this one process, created at the first call."""
    from megatron_rl.actor import groups

    if torch.distributed.is_initialized():
        return groups.topology_now()
    return groups.initialise()


def check_groups(row):
    """Check a collective on each of Megatron's single-process groups."""
    topology = one_process()
    one = torch.ones(1, device=topology.device)
    for group in (topology.tp_group, topology.cp_group, topology.pp_group, topology.dp_cp_group):
        torch.distributed.all_reduce(one, group=group)
    row.note("backend", torch.distributed.get_backend())
    row.at_most("sums over groups of one, minus one", abs(one.item() - 1), 0.0)


def check_head(row):
    """Compare tiled log-probs in low precision with float32 log_softmax of the same logits."""
    from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs

    torch.manual_seed(0)
    vocab, size = 32_000, 256
    hidden = torch.randn(512, size, device=DEVICE, dtype=LOW, requires_grad=True)
    weight = (torch.randn(vocab, size, device=DEVICE, dtype=LOW) * 0.05).requires_grad_()
    labels = torch.randint(0, vocab, (512,), device=DEVICE)
    mine, _ = token_logprobs(hidden, weight, labels, shard=VocabShard(0, vocab))
    logits = hidden.float() @ weight.float().t()
    plain = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    row.at_most("log-prob error", (mine - plain).abs().max().item(), 1e-3)
    got = torch.autograd.grad(mine.sum(), (hidden, weight))
    want = torch.autograd.grad(plain.sum(), (hidden, weight))
    gap = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
    row.at_most("gradient error", gap, 2e-2)


def check_objective(row):
    """Compare PNPO's loss and gradient on this device with those on the CPU."""
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
    row.at_most("loss error", abs(loss - wanted_loss), 1e-5)
    gap = ((gradient - wanted).norm() / wanted.norm()).item()
    row.at_most("gradient error", gap, 1e-4)


def attention_inputs(lengths, dtype, heads=(8, 2, 2), size=64):
    """Make random queries, keys and values; [T, heads, size] each."""
    total = sum(lengths)
    return [
        torch.randn(total, count, size, device=DEVICE, dtype=dtype, requires_grad=True)
        for count in heads
    ]


def attend(lengths, inputs, parents=()):
    """Attend within sequences, and to their parents, by the kernels in use on CUDA; [T, H, d]."""
    from megatron_rl.distributed.context_attention import build_attention_plan, context_attention
    from megatron_rl.distributed.sequence_layout import SequenceLayout

    mask = torch.ones(sum(lengths), dtype=torch.bool, device=DEVICE)
    layout = SequenceLayout(lengths, mask, parents=parents, used=lengths)
    plan = build_attention_plan(layout, fused=True)
    return context_attention(*inputs, plan=plan, group=None)


def plain_attention(lengths, inputs, parents=()):
    """Attend in float32, sequence by sequence, behind the keys of its parent; [T, H, d]."""
    query, *keys = (x.float().split(lengths) for x in inputs)
    parts = []
    for sequence, parent in enumerate(parents or [-1] * len(lengths)):
        seen = [parent, sequence] if parent >= 0 else [sequence]
        k, v = (torch.cat([x[one] for one in seen]).transpose(0, 1)[None] for x in keys)
        q = query[sequence].transpose(0, 1)[None]
        places = torch.arange(k.shape[2], device=DEVICE)
        mask = places <= places[-q.shape[2] :, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def check_attention(row):
    """Compare packed attention with plain attention per sequence, in both dtypes, and in trees."""
    lengths = (1024, 96, 2048, 512)
    for parents, name in (((), ""), ((-1, 0, -1, 2), " behind parents")):
        for dtype, output_bound, gradient_bound in ((LOW, 3e-2, 2e-2), (torch.float32, 1e-3, 1e-3)):
            torch.manual_seed(0)
            inputs = attention_inputs(lengths, dtype)
            mine = attend(lengths, inputs, parents)
            plain = plain_attention(lengths, inputs, parents)
            error = (mine.float() - plain).abs().max().item()
            row.at_most(f"{str(dtype)[6:]} output error{name}", error, output_bound)
            weights = torch.randn_like(plain)
            got = torch.autograd.grad((mine.float() * weights).sum(), inputs)
            want = torch.autograd.grad((plain * weights).sum(), inputs)
            gap = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
            row.at_most("gradient error", gap, gradient_bound)


def check_chunks(row):
    """Check attention of a context-parallel rank: query chunks that end before the last key."""
    from megatron_rl.distributed.context_attention import attend_fused

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
        row.at_most(f"{str(dtype)[6:]} output error", error, bound)


def check_delta_rule(row):
    """Compare flash-linear-attention's gated delta rule with torch's in float64.

    Also of each chunk's map M, of which context parallelism multiplies 2 cp - 1 in a row.
    """
    from megatron_rl.actor.gated_delta_net import find_kernel, kernel_rule
    from megatron_rl.distributed.gated_delta import torch_rule
    from megatron_rl.distributed.sequence_layout import SequenceLayout

    if DEVICE == "cpu":
        raise Skipped("needs CUDA")
    try:
        kernel = find_kernel()
    except ImportError as error:
        raise Skipped(str(error)) from error
    torch.manual_seed(0)
    lengths, key_heads, heads, size = (1024, 96, 2048, 512), 4, 8, 128
    total, chunks = sum(lengths), len(lengths)
    layout = SequenceLayout(lengths, torch.ones(total, dtype=torch.bool, device=DEVICE))
    q, k = (F.normalize(torch.randn(total, key_heads, size, device=DEVICE), dim=-1) for _ in "qk")
    v = F.pad(torch.randn(total, heads, size, device=DEVICE), (0, size))
    # Per token the decay is 0.99 on average, so that a chunk's M is not zero.
    g = -0.02 * torch.rand(total, heads, device=DEVICE)
    beta = torch.rand(total, heads, device=DEVICE)
    low = [x.to(LOW).requires_grad_() for x in (q, k, v)] + [x.requires_grad_() for x in (g, beta)]
    eye = F.pad(torch.eye(size, device=DEVICE), (size, 0)).expand(chunks, heads, size, 2 * size)
    results = []
    for rule, dtype in ((kernel_rule(kernel), None), (torch_rule, torch.float64)):
        given = low if dtype is None else [x.detach().to(dtype).requires_grad_() for x in low]
        before = eye if dtype is None else eye.to(dtype)
        out, after = rule(*given, before, layout)
        grads = torch.autograd.grad(out.double().square().sum() + after.double().sum(), given)
        results.append([out, *after.split(size, dim=-1), *grads])
    names = ("outputs", "B", "M", *(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta")))
    for name, mine, plain in zip(names, *results, strict=True):
        gap = ((mine.double() - plain.double()).norm() / plain.double().norm()).item()
        row.at_most(f"{name} error", gap, 2e-2)


def check_memory(row):
    """Check that the peak memory of attention, forward and backward, grows linearly."""
    if DEVICE == "cpu":
        raise Skipped("memory is measured on CUDA")
    for dtype in (LOW, torch.float32):
        peaks = []
        for tokens in (8192, 16384):
            inputs = attention_inputs((tokens,), dtype, heads=(12, 2, 2), size=128)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attend((tokens,), inputs).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        name = str(dtype)[6:]
        row.note(f"{name} MiB at 16k tokens", peaks[1] / 2**20)
        row.at_most(f"{name} growth from 8k to 16k tokens", peaks[1] / peaks[0], 2.2)
