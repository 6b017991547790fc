"""Time and peak memory of token log-probs: tiled head against materialized logits.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/benchmarks/head.py [--hidden 896]

Each case runs in its own process. Time is the best of --repeats: processor time on the CPU,
wall time on CUDA. Memory is the peak above inputs, weight and the weight's float32 gradient buffer.
"""

import argparse
import multiprocessing
import time

import torch

from megatron_rl.distributed.vocab_parallel import VocabShard, token_logprobs
from megatron_rl.telemetry.peak_memory import PeakMemory

VOCAB = 151_936  # Qwen2.5


def materialized(hidden, weight, labels):
    """Compute a plain head: logits [n, V] in float32, log_softmax, gather."""
    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)


def tiled(hidden, weight, labels):
    """Compute this package's head."""
    shard = VocabShard(0, VOCAB)
    return token_logprobs(hidden, weight, labels, shard=shard, into_main_grad=True)[0]


def measure(way, tokens, hidden_size, backward, repeats, queue):
    """Measure (seconds, peak bytes) of one implementation and put them into `queue`."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, requires_grad=backward)
    weight = torch.nn.Parameter(
        torch.randn(VOCAB, hidden_size, device=device, dtype=dtype) * 0.02, requires_grad=backward
    )
    labels = torch.randint(0, VOCAB, (tokens,), device=device)
    function = {"materialized": materialized, "tiled": tiled}[way]
    if backward:  # the float32 buffer in which Megatron accumulates gradients
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    memory = PeakMemory(device)
    seconds, peak = float("inf"), 0.0
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        memory.reset()
        before = memory.now()
        start = clock()
        with torch.set_grad_enabled(backward):
            out = function(hidden, weight, labels)
            if backward:
                out.sum().backward()
                if weight.grad is not None:
                    weight.main_grad.add_(weight.grad)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, clock() - start)
        peak = max(peak, memory.peak() - before)  # including library buffers of the first run
        del out
    queue.put((seconds, peak))


def run(*case):
    """Run `measure` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(*case, queue))
    process.start()
    result = queue.get()
    process.join()
    return result


def main():
    """Print the table of docs/measurements.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    print("| tokens | pass | plain s | tiled s | time | plain MiB | tiled MiB | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in args.tokens:
        for backward in (False, True):
            plain, ours = (
                run(way, tokens, args.hidden, backward, args.repeats)
                for way in ("materialized", "tiled")
            )
            name = "forward + backward" if backward else "forward"
            ratio = ours[0] / plain[0]
            print(
                f"| {tokens} | {name} | {plain[0]:.2f} | {ours[0]:.2f} | {ratio:.2f} x "
                f"| {plain[1] / 2**20:.0f} | {ours[1] / 2**20:.0f} "
                f"| 1/{plain[1] / max(ours[1], 1):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
