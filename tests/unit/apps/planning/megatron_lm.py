"""Memory and time of Megatron-LM's pretraining runs, by the planner's formulas.

`megatron_lm_rows.csv` contains NVIDIA's measurements: one line per file golden_values_*.json in
tests/functional_tests/test_cases of NVIDIA/Megatron-LM (commit d98e8a64; Apache-2.0, BSD-3-Clause)
that the formulas cover, with the sizes from its model_config.yaml at the time of the file's last
change. Memory is the peak allocated by torch on the last rank (GiB), time the median iteration (s).

These runs also use features that the actor does not have: biases, GELU, dropout masks, attention
that stores its scores, and logits of all tokens (bfloat16 and float32, 6 bytes each).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from megatron_rl.apps.planning.footprint import GRADIENT, OPTIMIZER, WEIGHT
from megatron_rl.apps.planning.layer_bytes import attention_kept, mlp_kept, norms_kept

GIB = 2**30
ROWS = Path(__file__).with_name("megatron_lm_rows.csv")
# GiB of cuBLAS and Transformer Engine workspaces.
WORKSPACES = {"a100": 0.078, "h100": 0.105, "gb200": 0.101}
TFLOPS = {"a100": 312e12, "h100": 989e12, "gb200": 2500e12}
GB_S = {"a100": 2039e9, "h100": 3350e9, "gb200": 8000e9}


@dataclass(frozen=True)
class Run:
    """One measured run, with sizes named as in Megatron-LM's arguments."""

    file: str
    kind: str  # device and software, as in a100-dev
    memory: float
    seconds: float
    world: int
    layers: int
    hidden: int
    ffn: int
    query: int
    key: int
    vocabulary: int
    gated: int
    bias: int
    untied: int
    positions: int
    sequence: int
    micro: int
    batch: int
    tensor: int
    pipeline: int
    chunks: int
    group: int
    context: int
    expert: int
    expert_tensor: int
    experts: int
    chosen: int
    expert_ffn: int
    grouped: int
    sequence_parallel: int
    sharded: int  # number of distributed optimizer instances; 0: not sharded
    full_recompute: int
    heads: int
    scores: int  # bytes stored per attention score; 0: fused attention
    masks: int  # whether dropout stores its masks
    local: int  # Megatron's local layers

    @property
    def device(self) -> str:
        return self.kind.split("-")[0]

    @property
    def replicas(self) -> int:
        return self.world // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.micro * self.replicas // self.context)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.sequence * self.micro / self.context


def load_runs() -> list[Run]:
    with ROWS.open() as file:
        return [
            Run(**{f.name: _TYPES[str(f.type)](row[f.name]) for f in fields(Run)})
            for row in csv.DictReader(line for line in file if not line.startswith("#"))
        ]


_TYPES = {"str": str, "int": int, "float": float}


def parameters(run: Run) -> tuple[float, float]:
    """Return the (dense, expert) parameters of a rank of the last stage."""
    h, matrices = run.hidden, 3 if run.gated else 2
    depth = run.layers // run.pipeline
    layer = h * (2 * run.query + 2 * run.key) / run.tensor + 4 * h
    if run.experts:
        layer += h * run.experts
    else:
        layer += matrices * h * run.ffn / run.tensor
    if run.bias:
        layer += (run.query + 2 * run.key + (0 if run.experts else run.ffn)) / run.tensor + 2 * h
    dense = depth * layer + run.vocabulary / run.tensor * h
    if run.pipeline == 1:
        dense += run.positions * h + (run.vocabulary / run.tensor * h if run.untied else 0)
    experts = depth * run.experts * matrices * h * run.expert_ffn
    return dense, experts / (run.expert * run.expert_tensor)


def predict_memory(run: Run) -> float:
    """Predict the last rank's peak in GiB: when the last micro-batch in flight has its logits."""
    dense, experts = parameters(run)
    over, experts_over = 1.0, 1.0
    if run.sharded:
        over = run.replicas / run.sharded
        experts_over = run.world / (run.pipeline * run.expert * run.expert_tensor)
        experts_over = max(1.0, experts_over / run.sharded)
    states = (WEIGHT + GRADIENT) * (dense + experts)
    states += OPTIMIZER * (dense / over + experts / experts_over)
    logits = 6 * run.tokens * run.vocabulary / run.tensor
    layer, depth = kept_of_layer(run), run.layers // run.pipeline
    if run.full_recompute:
        kept = depth * 2 * run.hidden * run.tokens + max(logits, layer)
    else:
        in_flight = 1
        if run.chunks > 1:
            in_flight = min((run.chunks - 1) * run.group + 1, run.micro_batches * run.chunks)
        kept = layer * depth / run.chunks * in_flight + logits
    return (states + kept) / GIB + WORKSPACES[run.device]


def kept_of_layer(run: Run) -> float:
    """Return the bytes that one layer stores per micro-batch."""
    shards = run.tensor if run.sequence_parallel else 1
    token = (norms_kept(run.hidden) + (2 * run.hidden if run.masks else 0)) / shards
    token += attention_kept(run.query, run.key) / run.tensor
    if run.experts:
        copy = 4 * run.hidden + mlp_kept(run.expert_ffn, gated=bool(run.gated)) / run.expert_tensor
        token += run.chosen * copy
    else:
        token += mlp_kept(run.ffn, gated=bool(run.gated)) / run.tensor
    scores = run.scores * run.heads / run.tensor * run.sequence**2 * run.micro
    return token * run.tokens + scores


def time_terms(run: Run) -> list[float]:
    """Return the terms of an iteration's time, each to be multiplied with its own coefficient."""
    depth, h = run.layers // run.pipeline, run.hidden
    steps = run.micro_batches + (run.pipeline - 1) / run.chunks
    passes = steps * depth * (4 / 3 if run.full_recompute else 1)
    mlp = (3 if run.gated else 2) * h * (run.chosen * run.expert_ffn if run.experts else run.ffn)
    products = (h * (2 * run.query + 2 * run.key) + mlp) / run.tensor
    head = h * run.vocabulary / run.tensor
    flops = 6 * run.tokens * (products * passes + head * steps)
    flops += 6 * run.query / run.tensor * run.sequence * run.tokens * passes
    scores = run.heads / run.tensor * run.sequence**2 * run.micro
    local = run.experts / run.expert if run.experts and not run.grouped else 1
    return [
        1.0,
        passes,
        passes * (run.tensor > 1),
        passes * (run.context > 1),
        passes * (run.experts > 0),
        passes * (local if run.experts else 0),
        passes * run.local,
        steps * run.chunks * (run.pipeline > 1),
        flops / TFLOPS[run.device],
        steps * 40 * run.tokens * run.vocabulary / run.tensor / GB_S[run.device],
        passes * 40 * scores * (run.scores > 0) / GB_S[run.device],
    ]


def calibrate(runs: list[Run]) -> np.ndarray:
    """Fit nonnegative coefficients of the time terms by least squares of the relative errors."""
    terms = np.array([time_terms(run) for run in runs])
    scaled = terms / np.array([[run.seconds] for run in runs])
    size = np.maximum(np.abs(scaled).max(0), 1e-30)
    scaled = scaled / size
    squares, target = scaled.T @ scaled, scaled.sum(0)
    coefficients = np.zeros(len(target))
    for _ in range(3000):  # coordinate descent
        for i in np.flatnonzero(squares.diagonal()):
            better = coefficients[i] + (target[i] - squares[i] @ coefficients) / squares[i, i]
            coefficients[i] = max(0.0, better)
    return coefficients / size
