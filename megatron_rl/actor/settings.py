"""How the actor computes and learns: plain values, read from the config by the caller."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_rl.actor.device import has_cuda

# Tokens of one rank's matrix products must be a multiple of this: in a weight's gradient they are
# the inner dimension, 16 of which cuBLAS multiplies at a time and 128 of which share a scale.
GEMM_TOKENS = {None: 1, "tensorwise": 16, "blockwise": 128}


@dataclass(frozen=True)
class ActorSettings:
    """Numerics, optimizer and memory choices of the actor; learning rates per optimizer update.

    The config checks each of them; here only what a rehearsal, which asks no device, would miss.
    """

    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    warmup_updates: int = 10
    total_updates: int = 1  # of the whole run: where a decay ends
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_grad: float = 1.0  # 0: no clipping
    effective_samples_power: float = 0.0  # of what multiplies an update's rate; 0: nothing does
    dtype: torch.dtype = torch.float32  # of parameters; gradients and optimizer are float32
    sequence_parallel: bool = True  # wherever tp > 1
    recompute: Literal["none", "selective", "full"] = "none"
    # Whether buckets of gradients are reduced while the last micro-batch's backward still runs.
    overlap_reduction: bool = field(default_factory=has_cuda)
    temperature: float = 1.0  # of the policy whose log-probs are computed
    # None: in bfloat16 on CUDA, where Transformer Engine is installed; False: never
    transformer_engine: bool | None = None
    # Scales of fp8 are those of the numbers at hand: with scales from earlier micro-batches the
    # same weights would give another log-prob each time.
    fp8: Literal["tensorwise", "blockwise"] | None = None

    @property
    def gemm_tokens(self) -> int:
        """What the tokens of a pack on one rank must be a multiple of."""
        return GEMM_TOKENS[self.fp8]

    def __post_init__(self) -> None:
        if self.fp8 and (self.transformer_engine is False or self.dtype != torch.bfloat16):
            raise ValueError(
                f"fp8={self.fp8} computes with Transformer Engine beside bfloat16, but "
                f"transformer_engine is {self.transformer_engine} and dtype {self.dtype}"
            )
