"""Settings of the actor: sections of the config, and values derived from other sections."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_rl.actor.device import has_cuda
from megatron_rl.config.sections import LoraSection, OptimizerSection
from megatron_rl.errors import UserError

# The number of tokens in one rank's matrix products must be a multiple of this. In a weight's
# gradient tokens are the inner dimension: cuBLAS requires a multiple of 16, and blocks of 128 share
# a scale.
GEMM_TOKENS = {None: 1, "tensorwise": 16, "blockwise": 128}


@dataclass(frozen=True)
class ActorSettings:
    """Optimizer, adapters, numerics and memory of the actor.

    The config validates each setting; the check here covers combinations that it cannot see.
    """

    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    warmup_updates: int = 10  # `optimizer.warmup_steps` in optimizer updates
    total_updates: int = 1  # in the whole run; the decay ends there
    lora: LoraSection | None = None  # None: train all parameters
    seed: int = 0  # of the adapters' first values and of rounding their sums with the weights
    dtype: torch.dtype = torch.float32  # of parameters; gradients and optimizer state are float32
    recompute: Literal["none", "selective", "full"] = "none"
    share_prompts: bool | Literal["auto"] = False  # see `actor.sharing`
    # Reduce gradient buckets while the last micro-batch's backward pass is still running.
    overlap_reduction: bool = field(default_factory=has_cuda)
    temperature: float = 1.0  # sampling temperature of the policy whose log-probs are computed
    # None: use Transformer Engine in bfloat16 on CUDA if it is installed; False: never.
    transformer_engine: bool | None = None
    # fp8 uses current scaling: with delayed scaling (scales from earlier micro-batches) the same
    # weights would give different log-probs each time.
    fp8: Literal["tensorwise", "blockwise"] | None = None
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
