"""Build Megatron's training stack for one rank: model chunks, gradient buffers, optimizer."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.actor.loss_contract import assert_sum_semantics, finalize_gradients
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.transformer_config import build_transformer_config
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape


def build_chunks(
    shape: ModelShape, *, settings: ActorSettings, topology: Topology
) -> list[PolicyModel]:
    """This rank's model chunks, one per virtual stage, on its device; weights are not set yet."""
    config = build_transformer_config(shape, settings, topology)
    virtual = topology.virtual_stages
    stages: list[int | None] = [None] if virtual == 1 else list(range(virtual))
    return [
        PolicyModel(
            shape,
            config=config,
            topology=topology,
            temperature=settings.temperature,
            virtual_stage=stage,
        ).to(topology.device)
        for stage in stages
    ]


def wrap_chunks(
    chunks: list[PolicyModel], settings: ActorSettings
) -> list[DistributedDataParallel]:
    """Chunks with contiguous float32 gradient buffers, summed over data x context parallelism.

    Parameters are gathered where they are stepped, not in the next forward: who reads weights (a
    push, a checkpoint) then never meets stale ones.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=settings.overlap_reduction,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # the optimizer step reports it through the gradient norm
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_reduction:
        waiting = [chunk.no_sync for chunk in wrapped]  # until the last micro-batch
        config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
        for chunk in chunks:
            chunk.announce_head_gradient()
    config.finalize_model_grads_func = finalize_gradients
    assert_sum_semantics(wrapped, config=config)
    return wrapped


def build_optimizer(
    wrapped: list[DistributedDataParallel], settings: ActorSettings
) -> MegatronOptimizer:
    """AdamW whose float32 state is cut over data x context parallelism.

    As in Megatron, vectors (norms, biases) are not decayed.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=settings.dtype.is_floating_point and settings.dtype.itemsize == 2,
        params_dtype=settings.dtype,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(config, wrapped)
    wrapped[0].config.grad_scale_func = optimizer.scale_loss
    for part in optimizer_parts(optimizer):
        _allocate_moments(part.optimizer)
        step_in_one_kernel(part.optimizer, next(wrapped[0].parameters()).device)
    return optimizer


def step_optimizer(optimizer: MegatronOptimizer, wrapped: list[DistributedDataParallel]) -> None:
    """Update this rank's share of the parameters, then gather all of them, once.

    With experts Megatron chains two optimizers over the same chunks; those of Megatron-core 0.16
    gather every parameter each, so all of them twice.
    """
    for part in optimizer_parts(optimizer):
        super(DistributedOptimizer, part).step_with_ready_grads()
    for chunk in wrapped:
        chunk.start_param_sync()


def step_in_one_kernel(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let torch's Adam, where Transformer Engine's is absent, update CUDA parameters in one pass.

    Its default makes several, and a temporary as large as the parameters. Its one kernel counts
    steps on the device. By the device, not by a group's parameters: a rank may have none of them,
    and a checkpoint keeps one set of options for all ranks.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        group["fused"] = device.type == "cuda"
        if group["fused"]:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state["step"] = state["step"].to(parameter.device)


def _allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero moments now instead of at the first update.

    Megatron-core can neither save nor load an optimizer that has no state yet. Torch's Adam counts
    steps by parameter, Transformer Engine's and apex's by group.
    """
    counts_by_parameter = isinstance(optimizer, torch.optim.Adam)
    for group in optimizer.param_groups:
        if not counts_by_parameter:
            group["step"] = 0
        for parameter in group["params"]:
            step = {"step": torch.tensor(0.0)} if counts_by_parameter else {}
            optimizer.state[parameter] = {
                **step,
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
