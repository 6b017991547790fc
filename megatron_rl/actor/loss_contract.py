"""Adapter from our losses to Megatron's: everything is summed, nothing is averaged.

Objectives return per-token losses that are already divided by global denominators, so the loss of
a minibatch is the plain sum over tokens, micro-batches and ranks. By default Megatron's schedules
and its gradient reduction divide by the number of micro-batches and average over data x context
parallelism. They do not rescale if `calculate_per_token_loss` is set, the loss function
returns three values, and `finalize_model_grads` is given no token count (megatron/core/pipeline_
parallel/schedules.py, forward_step_calc_loss; distributed/distributed_data_parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

SUM_SEMANTICS: dict[str, Any] = {"calculate_per_token_loss": True}

MegatronLoss = Callable[[Tensor], tuple[Tensor, Tensor, Any]]


def as_megatron_loss(compute: Callable[[Tensor], tuple[Tensor, Any]]) -> MegatronLoss:
    """Convert our loss, log-probs [t] -> (loss [t], report), to Megatron's loss function."""

    def loss_function(logprobs: Tensor) -> tuple[Tensor, Tensor, Any]:
        loss, report = compute(logprobs)
        # The second value is a token count that `finalize_gradients` ignores.
        return loss.sum(), torch.ones((), dtype=torch.int, device=loss.device), report

    return loss_function


def finalize_gradients(
    chunks: Sequence[torch.nn.Module],
    num_tokens: Tensor | None = None,
    *,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """Reduce gradients over all groups as Megatron does, without dividing by `num_tokens`.

    before: called first, when this rank's own passes are done and it waits for others from now on.
    """
    before()
    megatron_finalize_model_grads(list(chunks), None, **options)


def assert_sum_semantics(
    chunks: Sequence[DistributedDataParallel], *, config: TransformerConfig
) -> None:
    """Assert at startup that this Megatron release does not rescale losses or gradients.

    The schedule must return a loss of 3 unchanged for any number of micro-batches and
    context-parallel ranks, and gradient buffers must be summed without scaling.
    """
    probe, _ = forward_step_calc_loss(
        torch.nn.Identity(),
        torch.ones(()),
        as_megatron_loss(lambda x: (3 * x, None)),
        config,
        None,
        False,
        7,
        [],
        cp_group_size=5,
        is_last_stage=True,
    )
    assert probe.item() == 3.0, f"Megatron's schedule turned a loss of 3 into {probe.item()}"
    assert getattr(config.finalize_model_grads_func, "func", None) is finalize_gradients, (
        "finalize_model_grads would divide gradients by a token count"
    )
    for chunk in chunks:
        assert not chunk.ddp_config.average_in_collective, "gradients would be averaged"
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            assert buffer.gradient_scaling_factor == 1.0, (
                f"gradients would be scaled by {buffer.gradient_scaling_factor}"
            )
