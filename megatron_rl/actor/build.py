"""Construction of Megatron's training stack for one rank: config, model chunks, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.actor.loss_contract import SUM_SEMANTICS, assert_sum_semantics, finalize_gradients
from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.actor.model import PolicyModel, uses_transformer_engine
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import adapters_of_experts
from megatron_rl.models.shape import ExpertShape, ModelShape
from megatron_rl.resharding.layouts import layout_of


def build_transformer_config(
    shape: ModelShape, settings: ActorSettings, topology: Topology
) -> TransformerConfig:
    """Build the config of every Megatron module in the actor."""
    targets = settings.lora.targets if settings.lora else ()
    on_te = uses_transformer_engine(
        settings,
        device=topology.device,
        window=shape.sliding_window,
        cp_size=topology.cp_size,
        local_only=shape.traits.local_only or adapters_of_experts(shape, targets),
    )
    return TransformerConfig(
        **_model(shape),
        **_layout(topology, settings),
        **_stages(shape, topology),
        **_numerics(topology, settings),
        **_recompute(shape, settings),
        **_experts(shape, settings, topology, grouped=on_te),
        transformer_impl="transformer_engine" if on_te else "local",
        **SUM_SEMANTICS,
    )


def _model(shape: ModelShape) -> dict[str, Any]:
    window, local = shape.sliding_window, shape.local_layers
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.gelu if shape.traits.activation == "gelu_tanh" else F.silu,
        "add_bias_linear": shape.traits.biases,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Keys before and after a query's own, for Transformer Engine; our attention has its plan.
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None if local is None else local.flags(shape.num_layers),
        "softmax_scale": shape.softmax_scale,
        "softmax_type": "learnable" if shape.has_sinks else "vanilla",
        "layernorm_zero_centered_gamma": shape.traits.zero_centered_norms,
        "attention_output_gate": shape.traits.output_gate,
        # A list keeps checkpoints from stacking layers that differ.
        "linear_attention_freq": None
        if shape.delta is None
        else [int(layer in shape.delta.layers) for layer in range(shape.num_layers)],
    }


def _layout(topology: Topology, settings: ActorSettings) -> dict[str, Any]:
    virtual = topology.virtual_stages
    return {
        "tensor_model_parallel_size": topology.tp_size,
        "pipeline_model_parallel_size": topology.pp_size,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "context_parallel_size": topology.cp_size,
        # It saves memory at no cost, and Megatron trains experts under tensor parallelism only so.
        "sequence_parallel": topology.tp_size > 1,
        # Interleaved stages send both ways between the same two ranks; only Megatron's overlapped
        # communication keeps the two directions apart.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
        "variable_seq_lengths": True,
        "batch_p2p_sync": False,  # would wait for the device after each hop, for old torch
        "moe_token_dispatcher_type": "alltoall",  # "flex" needs DeepEP; nothing here has run it
    }


def _stages(shape: ModelShape, topology: Topology) -> dict[str, Any]:
    """List every model chunk's layers for Megatron, unless all chunks have the same number."""
    chunks = layout_of(topology).chunks(shape)
    if len({len(layers) for layers in chunks}) == 1:
        return {}
    rows = [["decoder"] * len(layers) for layers in chunks]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return {"pipeline_model_parallel_layout": rows}


def _numerics(topology: Topology, settings: ActorSettings) -> dict[str, Any]:
    on_cuda = topology.device.type == "cuda"
    return {
        "params_dtype": settings.dtype,
        "pipeline_dtype": settings.dtype,
        "bf16": settings.dtype == torch.bfloat16,
        "use_cpu_initialization": not on_cuda,
        "perform_initialization": False,  # every weight is loaded
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        **({"fp8": "hybrid", "fp8_recipe": settings.fp8} if settings.fp8 else {}),
    }


def _recompute(shape: ModelShape, settings: ActorSettings) -> dict[str, Any]:
    if settings.recompute == "full":  # keep only each layer's input
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if settings.recompute == "selective":
        # Our attention's memory is linear; most memory is in the MLP, or router and experts.
        modules = ["mlp"] if shape.layers_with("dense") else []
        modules += ["moe"] if shape.experts else []
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _groups(experts: ExpertShape) -> dict[str, Any]:
    if experts.groups == 1:
        return {}
    return {
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.chosen_groups,
    }


def _dense_layers(shape: ModelShape) -> dict[str, Any]:
    """List which layers have experts, so that a checkpoint does not stack layers that differ."""
    first = shape.num_layers - len(shape.layers_with("experts"))
    return {"moe_layer_freq": [int(n >= first) for n in range(shape.num_layers)]} if first else {}


def _experts(
    shape: ModelShape, settings: ActorSettings, topology: Topology, *, grouped: bool
) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {}
    if settings.fp8 == "blockwise":
        raise UserError(
            "fp8=blockwise for a mixture of experts: blocks of 128 tokens share a scale, but "
            "Megatron pads the tokens of an expert to a multiple of 16; use fp8=tensorwise"
        )
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": shape.shared_expert_gate,
        "moe_grouped_gemm": grouped,  # all local experts in one product
        # Transformer Engine's kernels that sort tokens by expert; they exist only for CUDA.
        "moe_permute_fusion": grouped and topology.device.type == "cuda",
        "moe_router_load_balancing_type": "none",
        # Softmax over the chosen experts is softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": experts.scoring,
        "moe_router_topk_scaling_factor": None if experts.scale == 1 else experts.scale,
        **_groups(experts),
        **_dense_layers(shape),
        "expert_model_parallel_size": topology.ep_size,
        "expert_tensor_parallel_size": topology.expert_tp_size or topology.tp_size,
    }


def build_chunks(
    shape: ModelShape,
    *,
    settings: ActorSettings,
    topology: Topology,
    model: type[PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """Build this rank's model chunks, one per virtual stage, without loading weights."""
    config = build_transformer_config(shape, settings, topology)
    virtual = topology.virtual_stages
    stages: list[int | None] = [None] if virtual == 1 else list(range(virtual))
    return [
        model(
            shape,
            config=config,
            topology=topology,
            temperature=settings.temperature,
            virtual_stage=stage,
        ).to(topology.device)
        for stage in stages
    ]


def wrap_chunks(
    chunks: list[PolicyModel],
    settings: ActorSettings,
    *,
    before_reduction: Callable[[], object] = lambda: None,
) -> list[DistributedDataParallel]:
    """Wrap chunks in DDP with float32 gradient buffers, summed over data x context parallelism.

    Parameters are gathered right after the optimizer step, not in the next forward pass, so that
    weight synchronization and checkpoints never read stale weights. before_reduction: called when
    this rank's backward passes are done, before it waits for the gradients of others.
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
    config.finalize_model_grads_func = partial(finalize_gradients, before=before_reduction)
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
        lr=settings.optimizer.learning_rate,
        min_lr=settings.optimizer.min_learning_rate,
        weight_decay=settings.optimizer.weight_decay,
        adam_beta1=settings.optimizer.beta1,
        adam_beta2=settings.optimizer.beta2,
        adam_eps=settings.optimizer.epsilon,
        clip_grad=settings.optimizer.max_grad_norm,
        bf16=settings.dtype.is_floating_point and settings.dtype.itemsize == 2,
        params_dtype=settings.dtype,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(config, ddp_chunks, use_gloo_process_groups=False)
    ddp_chunks[0].config.grad_scale_func = optimizer.scale_loss
    for part in optimizer_parts(optimizer):
        _allocate_moments(part.optimizer)
        step_in_one_kernel(part.optimizer)
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


def step_in_one_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Use torch's fused Adam if Transformer Engine's Adam is not installed.

    The default implementation makes several passes and a temporary as large as the parameters. The
    fused kernel counts steps on the device. A checkpoint may have stored another choice.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
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
