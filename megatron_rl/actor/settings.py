"""Settings of the actor as plain values, which the caller takes from the config."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_rl.actor.device import has_cuda
from megatron_rl.errors import UserError

# The number of tokens in one rank's matrix products must be a multiple of this. In a weight's
# gradient tokens are the inner dimension: cuBLAS requires a multiple of 16, and blocks of 128 share
# a scale.
GEMM_TOKENS = {None: 1, "tensorwise": 16, "blockwise": 128}


@dataclass(frozen=True)
class LoraSettings:
    """Adapters on the model's linears; all other parameters are frozen (arXiv 2106.09685).

    rank: r, columns of B and rows of A. alpha: the update is alpha / r times B A. targets: which
    linears have an adapter: of attention qkv and proj, of MLPs and experts fc1 (gate and up) and
    fc2 (down). init: distribution of A's initial values: uniform within 1 / sqrt(inputs), or
    gaussian with standard deviation 1 / r; B starts at 0. seed: of the initial values. path: a
    folder of the `peft` library that has the first adapters instead.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("qkv", "proj", "fc1", "fc2")
    init: Literal["uniform", "gaussian"] = "uniform"
    seed: int = 0
    path: str | None = None

    @property
    def scale(self) -> float:
        """Factor of B A in the sum with a weight."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class ActorSettings:
    """Numerics, optimizer and memory settings of the actor; learning rates per optimizer update.

    The config validates each setting; the check here covers combinations that it cannot see.
    """

    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    warmup_updates: int = 10
    total_updates: int = 1  # in the whole run; the decay ends there
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0  # 0: no clipping
    # Multiplies each update's rate by (effective sample fraction) ** power; 0 disables it.
    effective_samples_power: float = 0.0
    dtype: torch.dtype = torch.float32  # of parameters; gradients and optimizer state are float32
    sequence_parallel: bool = True  # wherever tp > 1
    recompute: Literal["none", "selective", "full"] = "none"
    # Reduce gradient buckets while the last micro-batch's backward pass is still running.
    overlap_reduction: bool = field(default_factory=has_cuda)
    temperature: float = 1.0  # sampling temperature of the policy whose log-probs are computed
    # None: use Transformer Engine in bfloat16 on CUDA if it is installed; False: never.
    transformer_engine: bool | None = None
    # fp8 uses current scaling: with delayed scaling (scales from earlier micro-batches) the same
    # weights would give different log-probs each time.
    fp8: Literal["tensorwise", "blockwise"] | None = None
    lora: LoraSettings | None = None  # None: train all parameters
    replay_routes: bool = False  # passes over packs with recorded routes replay them

    @property
    def gemm_tokens(self) -> int:
        """Required multiple of a pack's number of tokens on one rank."""
        return GEMM_TOKENS[self.fp8]

    def __post_init__(self) -> None:
        if self.fp8 and (self.transformer_engine is False or self.dtype != torch.bfloat16):
            raise UserError(
                f"fp8={self.fp8} requires Transformer Engine and bfloat16, but "
                f"transformer_engine is {self.transformer_engine} and dtype is {self.dtype}"
            )
        if self.lora and self.fp8:
            raise UserError(
                f"lora with fp8={self.fp8}: adapters have not been tried with products in fp8; "
                "unset fp8"
            )
