"""Construction of Megatron's training stack for one rank: model chunks, buffers, optimizer."""

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
    """Build this rank's model chunks, one per virtual stage, without loading weights."""
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
    """Wrap chunks in DDP with float32 gradient buffers, summed over data x context parallelism.

    Parameters are gathered right after the optimizer step, not in the next forward pass, so that
    weight synchronization and checkpoints never read stale weights.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=settings.overlap_reduction,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # the optimizer step reports it through the gradient norm
    )
    ddp_chunks = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_reduction:
        no_sync = [chunk.no_sync for chunk in ddp_chunks]  # until the last micro-batch
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        for chunk in chunks:
            chunk.announce_head_gradient()
    config.finalize_model_grads_func = finalize_gradients
    assert_sum_semantics(ddp_chunks, config=config)
    return ddp_chunks


def build_optimizer(
    ddp_chunks: list[DistributedDataParallel], settings: ActorSettings
) -> MegatronOptimizer:
    """Build AdamW with float32 state sharded over data x context parallelism.

    As in Megatron, weight decay does not apply to vectors (norms, biases).
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.max_grad_norm,
        bf16=settings.dtype.is_floating_point and settings.dtype.itemsize == 2,
        params_dtype=settings.dtype,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(config, ddp_chunks, use_gloo_process_groups=False)
    ddp_chunks[0].config.grad_scale_func = optimizer.scale_loss
    for part in optimizer_parts(optimizer):
        _allocate_moments(part.optimizer)
        step_in_one_kernel(part.optimizer, next(ddp_chunks[0].parameters()).device)
    return optimizer


def step_optimizer(optimizer: MegatronOptimizer, ddp_chunks: list[DistributedDataParallel]) -> None:
    """Update this rank's shard of the parameters, then gather all parameters once.

    With experts Megatron chains two optimizers over the same chunks, and each of them would gather
    the buckets of both.
    """
    for part in optimizer_parts(optimizer):
        super(DistributedOptimizer, part).step_with_ready_grads()
    for chunk in ddp_chunks:
        chunk.start_param_sync()


def step_in_one_kernel(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Use torch's fused Adam on CUDA if Transformer Engine's Adam is not installed.

    The default implementation makes several passes and a temporary as large as the parameters. The
    fused kernel counts steps on the device. The choice depends on the device, not on a group's
    parameters: a rank may have none, and a checkpoint stores one set of options for all ranks.
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
    """Allocate zero moments now instead of at the first update.

    Megatron-core can neither save nor load an optimizer without state. Torch's Adam counts steps
    per parameter, Transformer Engine's and apex's per group.
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
