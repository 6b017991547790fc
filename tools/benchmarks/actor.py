"""Tokens per second of a full update: this actor against plain transformers and torch.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/actor.py [--layouts 1,1,1,1 1,1,2,1]

Both use the same random Qwen2, long-tailed rollouts (lognormal lengths), GRPO loss and AdamW. The
baseline pads every micro-batch to its longest sequence and materializes logits. Useful tokens are
those of prompts and responses; padding efficiency is useful / processed. Utilization is the model's
FLOP (6 per parameter and useful token, 6 per layer, hidden unit and causal pair of tokens, without
recomputation or padding) over --peak-tflops of one device, by default the measured rate of a large
matrix product. Memory is the peak of one rank during an update, above its memory between updates.
It is measured in a separate update after emptying the allocator's cache, which makes timed updates
faster. On the CPU, time is wall time: keep the machine idle.
"""

import argparse
import ctypes
import os
import tempfile
import time

import torch

from megatron_rl.data.packing import plan_minibatches, sequence_length
from megatron_rl.telemetry.peak_memory import PeakMemory
from megatron_rl.types import GradeResult, Prompt, Response, Rollout
from tests.ranks import run_ranks

VOCAB = 4096


def make_model(folder, hidden, layers):
    """Write a random Qwen2; return its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_rollouts(count, longest):
    """Build groups of 8 with lognormal response lengths, median near an eighth of the longest."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=generator)) * longest / 8
    rollouts = []
    for index, length in enumerate(lengths.clamp(8, longest).int().tolist()):
        tokens = torch.randint(0, VOCAB, (16 + length,), generator=generator).tolist()
        prompt = Prompt(index // 8, (), tuple(tokens[:16]), "", "")
        response = Response(
            index // 8, index % 8, tuple(tokens[16:]), (0.0,) * length, "", "stop", 0
        )
        rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
    return rollouts, torch.randn(count, generator=generator)


def model_flop(parameters, hidden, layers, lengths):
    """Return the FLOP of one update on sequences of these lengths."""
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 6 * parameters * sum(lengths) + 3 * 4 * layers * hidden * pairs


def measure_peak(rank, world_size):
    """Measure the FLOP/s of a large matrix product in the actor's dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def measure(update, *, repeats, device):
    """Return (seconds of the fastest update, peak bytes of a separate update)."""
    seconds, memory = float("inf"), PeakMemory(device)
    for _ in range(repeats):
        start = time.perf_counter()
        update()
        if memory.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    if memory.device.type == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
    memory.reset()
    before = memory.now()
    update()
    return seconds, memory.peak() - before


def time_actor(rank, world_size, folder, layout, args):
    """Return (seconds per update, processed tokens, peak bytes) of one layout, on every rank."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.objectives import build_objective

    tensor, pipeline, context, _ = layout
    topology = groups.initialise(tensor=tensor, pipeline=pipeline, context=context)
    settings = ActorSettings(warmup_updates=0, recompute=args.recompute)
    actor = MegatronActor(folder, topology=topology, settings=settings)
    minibatch = plan_minibatches(
        *make_rollouts(args.rollouts, args.longest),
        minibatches=1,
        tokens_per_micro_batch=args.budget,
        topology=topology,
        sequence_parallel=actor.sequence_parallel,
    )[0]
    packs = minibatch.micro_batches
    for pack, logprobs in zip(packs, actor.compute_logprobs(packs), strict=True):
        pack.behavior_logprobs = logprobs
    seconds, peak = measure(
        lambda: actor.update(minibatch, build_objective("grpo")),
        repeats=args.repeats,
        device=topology.device,
    )
    processed = sum(sum(pack.lengths) for pack in packs) * topology.dp_size
    return seconds, processed, peak


def time_transformers(rank, world_size, folder, args):
    """Run the same update with transformers: padded micro-batches, full logits, torch's AdamW."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1)
    rollouts, advantages = make_rollouts(args.rollouts, args.longest)
    size = max(1, args.budget // args.longest)  # sequences of maximum length that fit the budget
    total = sum(len(rollout.response.token_ids) for rollout in rollouts)
    processed = 0

    def update():
        nonlocal processed
        processed = 0
        optimizer.zero_grad()
        for first in range(0, len(rollouts), size):
            some = rollouts[first : first + size]
            texts = [[*r.prompt.token_ids, *r.response.token_ids] for r in some]
            longest = max(map(len, texts))
            tokens = torch.tensor([t + [0] * (longest - len(t)) for t in texts], device=device)
            mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts])
            mask = mask.to(device)
            logits = model(tokens, attention_mask=mask).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
            weights = mask[:, 1:] * advantages[first : first + size, None].to(device)
            weights[:, :15] = 0
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.28) * weights).sum() / total
            loss.backward()
            processed += tokens.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds, peak = measure(update, repeats=args.repeats, device=device)
    return seconds, processed, peak


def main():
    """Print the table of docs/measurements.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=["1,1,1,1"], help="tp,pp,cp,dp")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=4096, help="Tokens per micro-batch.")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--peak-tflops", type=float, help="Peak rate of one device; default: measured."
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder, args.hidden, args.layers)
        rollouts, _ = make_rollouts(args.rollouts, args.longest)
        lengths = [sequence_length(rollout) for rollout in rollouts]
        useful = sum(lengths)
        flop = model_flop(parameters, args.hidden, args.layers, lengths)
        flops = args.peak_tflops * 1e12 if args.peak_tflops else run_ranks(measure_peak, 1)[0]
        devices = torch.cuda.device_count() or os.cpu_count()
        print(f"{parameters:,} parameters, {useful:,} useful tokens in {len(rollouts)} rollouts")
        print(f"{flop / 1e9:,.0f} GFLOP per update, {flops / 1e9:,.0f} GFLOP/s of one device")
        print("| way | s per update | useful tokens/s | useful / processed | utilization | MiB |")
        print("|---|---|---|---|---|---|")
        results = [("transformers", 1, run_ranks(time_transformers, 1, folder, args))]
        for text in args.layouts:
            layout = tuple(map(int, text.split(",")))
            ranks = layout[0] * layout[1] * layout[2] * layout[3]
            timed = run_ranks(time_actor, ranks, folder, layout, args)
            results.append(("actor tp{} pp{} cp{} dp{}".format(*layout), ranks, timed))
        for name, ranks, timed in results:
            seconds, processed, _ = max(timed)
            peak = max(peak for _, _, peak in timed)
            share = flop / (seconds * flops * min(ranks, devices))
            print(
                f"| {name} | {seconds:.2f} | {useful / seconds:,.0f} | {useful / processed:.3f} "
                f"| {share:.1%} | {peak / 2**20:,.0f} |"
            )


if __name__ == "__main__":
    main()
