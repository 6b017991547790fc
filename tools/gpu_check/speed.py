"""Device utilization of an update: a 1.5B model, a mixture of experts, and fp8."""

import gc
import tempfile
from pathlib import Path

import torch

from tools.gpu_check.actors import require_fp8
from tools.gpu_check.models import EXPERTS, make_rollouts, save_random_model
from tools.gpu_check.numerics import one_process
from tools.gpu_check.row import DEVICE, LOW, timed

MIN_UTILIZATION = 0.25  # an H100 reached 0.37 to 0.48
PACK = [4096] * 4 if DEVICE == "cuda" else [64] * 4


def check_update_16k(row):
    """Measure the utilization of an update on one pack of 16,384 tokens in four sequences."""
    _measure(row, PACK)


def check_update_32k(row):
    """Measure the utilization of an update on one sequence of 32,768 tokens."""
    _measure(row, [32768] if DEVICE == "cuda" else [256])


def check_update_experts(row):
    """Measure an update of an eighth of Qwen3-30B-A3B's layers, with all 128 experts in each."""
    _measure(row, PACK, model=_experts(row))


def check_routes(row):
    """Time an update that replays its experts next to one whose routers choose, both recomputed."""
    model = _experts(row)
    seconds = {replay: _measure(row, PACK, model=model, replay_routes=replay,
                                label="replayed: " if replay else "chosen: ")
               for replay in (False, True)}  # fmt: skip
    row.note("seconds replayed / chosen", seconds[True] / seconds[False])


def _experts(row):
    """Return the config of as many layers of Qwen3-30B-A3B as fit."""
    shape = EXPERTS
    if DEVICE == "cuda":
        # Weights, gradients and Adam's state take 18 bytes a parameter: 76 GB for six layers.
        fits = torch.cuda.get_device_properties(0).total_memory > 100e9
        shape = {**shape, "num_hidden_layers": 6 if fits else 4}
    row.note("layers", shape["num_hidden_layers"])
    return shape


def check_update_fp8(row):
    """Time an update with fp8 matrix products next to one in bfloat16."""
    require_fp8()
    seconds = {fp8: _measure(row, PACK, label=f"{fp8 or 'bfloat16'}: ", fp8=fp8)
               for fp8 in (None, "tensorwise")}  # fmt: skip
    row.note("seconds in bfloat16 / in fp8", seconds[None] / seconds["tensorwise"])


def _measure(row, lengths, *, model=None, label="", **settings):
    """Note tokens/s, FLOP/s and utilization; return the seconds of an update."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.objectives import build_objective

    topology = one_process()
    gc.collect()  # an actor of an earlier call, whose hooks refer to it
    with tempfile.TemporaryDirectory() as temporary:
        config = save_random_model(Path(temporary) / "model", model)
        settings = ActorSettings(
            optimizer=OptimizerSection(learning_rate=1e-6), dtype=LOW, recompute="full", **settings
        )
        actor = MegatronActor(Path(temporary) / "model", topology=topology, settings=settings)
    (minibatch,) = plan_minibatches(
        make_rollouts(lengths, config["vocab_size"]),
        torch.randn(len(lengths)),
        minibatches=1,
        tokens_per_micro_batch=sum(lengths),
        topology=topology,
        gemm_tokens=settings.gemm_tokens,
    )
    packs = minibatch.micro_batches
    scored = actor.compute_logprobs(packs, routing="record")
    for pack, behavior in zip(packs, scored, strict=True):
        pack.behavior_logprobs = behavior
    objective = build_objective("grpo")
    first = actor.update(minibatch, objective).statistics.to_metrics()["ratio/max_deviation"]
    row.at_most(f"{label}first ratio - 1", first, 0.0)
    seconds = min(timed(actor.update, minibatch, objective) for _ in range(3))
    needed, peak = model_flop(config, lengths), product_flop_per_second()
    row.note(f"{label}tokens/s", sum(lengths) / seconds)
    row.note(f"{label}TFLOP/s", needed / seconds / 1e12)
    row.note(f"{label}TFLOP/s of a matrix product", peak / 1e12)
    # A bound is known for the dense model alone.
    judge_utilization(row, needed / seconds / peak, label=label, bound=model is None and not label)
    return seconds


def judge_utilization(row, utilization, *, label="", bound=True):
    """Record the utilization relative to a large matrix product; there is no bound on a CPU."""
    if DEVICE == "cuda" and bound:
        row.at_least("utilization", utilization, MIN_UTILIZATION)
    else:
        row.note(f"{label}utilization", utilization)


def model_flop(config, lengths):
    """Return the FLOP of one update: 6 per weight and token, 12 per query unit and token pair.

    Recomputation is not counted; causal attention has half of the pairs.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    queries = heads * config.get("head_dim", hidden // heads)
    keys = 2 * queries // heads * config["num_key_value_heads"]
    mlp = 3 * config["intermediate_size"]
    if "num_experts" in config:  # those that a token uses, and the router
        mlp = config["num_experts_per_tok"] * 3 * config["moe_intermediate_size"]
        mlp += config["num_experts"]
    layer = hidden * (2 * queries + keys + mlp)
    weights = layers * layer + hidden * config["vocab_size"]
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 6 * weights * sum(lengths) + 12 * layers * queries * pairs


def product_flop_per_second():
    """Measure the FLOP/s of a large matrix product."""
    size = 8192 if DEVICE == "cuda" else 512
    matrix = torch.randn(size, size, device=DEVICE, dtype=LOW)
    torch.mm(matrix, matrix)
    return 2 * size**3 / min(timed(torch.mm, matrix, matrix) for _ in range(5))
