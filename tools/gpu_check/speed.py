"""Device utilization of an update of the 1.5B model."""

import tempfile
import time
from pathlib import Path

import torch

from tools.gpu_check.models import make_rollouts, save_random_model
from tools.gpu_check.numerics import one_process
from tools.gpu_check.row import DEVICE, LOW

MIN_UTILIZATION = 0.25  # an H100 reached 0.37 to 0.48


def check_update_16k(row):
    """Measure the utilization of an update on one pack of 16,384 tokens in four sequences."""
    _measure(row, [4096] * 4 if DEVICE == "cuda" else [64] * 4)


def check_update_32k(row):
    """Measure the utilization of an update on one sequence of 32,768 tokens."""
    _measure(row, [32768] if DEVICE == "cuda" else [256])


def _measure(row, lengths):
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.objectives import build_objective

    topology = one_process()
    with tempfile.TemporaryDirectory() as temporary:
        config = save_random_model(Path(temporary) / "model")
        settings = ActorSettings(learning_rate=1e-6, dtype=LOW, recompute="full")
        actor = MegatronActor(Path(temporary) / "model", topology=topology, settings=settings)
    (minibatch,) = plan_minibatches(
        make_rollouts(lengths, config["vocab_size"]),
        torch.randn(len(lengths)),
        minibatches=1,
        tokens_per_micro_batch=sum(lengths),
        topology=topology,
        sequence_parallel=False,
    )
    packs = minibatch.micro_batches
    for pack, behavior in zip(packs, actor.compute_logprobs(packs), strict=True):
        pack.behavior_logprobs = behavior
    objective = build_objective("grpo")
    seconds = min(_timed(actor.update, minibatch, objective) for _ in range(3))
    needed, peak = model_flop(config, lengths), product_flop_per_second()
    row.note("tokens/s", sum(lengths) / seconds)
    row.note("TFLOP/s", needed / seconds / 1e12)
    row.note("TFLOP/s of a matrix product", peak / 1e12)
    judge_utilization(row, needed / seconds / peak)


def judge_utilization(row, utilization):
    """Record the utilization relative to a large matrix product; there is no bound on a CPU."""
    if DEVICE == "cuda":
        row.at_least("utilization", utilization, MIN_UTILIZATION)
    else:
        row.note("utilization", utilization)


def model_flop(config, lengths):
    """Return the FLOP of one update: 6 per weight and token, 12 per hidden unit and token pair.

    Recomputation is not counted; causal attention has half of the pairs.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    size = hidden // config["num_attention_heads"]
    keys = 2 * size * config["num_key_value_heads"]
    layer = hidden * (2 * hidden + keys + 3 * config["intermediate_size"])
    weights = layers * layer + hidden * config["vocab_size"]
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 6 * weights * sum(lengths) + 12 * layers * hidden * pairs


def product_flop_per_second():
    """Measure the FLOP/s of a large matrix product."""
    size = 8192 if DEVICE == "cuda" else 512
    matrix = torch.randn(size, size, device=DEVICE, dtype=LOW)
    torch.mm(matrix, matrix)
    return 2 * size**3 / min(_timed(torch.mm, matrix, matrix) for _ in range(5))


def _timed(act, *arguments):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    act(*arguments)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
