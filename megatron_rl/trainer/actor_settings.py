"""The actor's process groups and settings as a config states them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_rl.actor import groups
from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.critic import Critic
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.config import Config
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.adapters import AdapterSettings


def make_groups(config: Config, **further: Any) -> Topology:
    """The process groups of the config's layout, as `groups.initialise`. Collective."""
    parallel = config.parallel
    return groups.initialise(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor_size,
        virtual_stages=parallel.virtual_stages,
        stage_layers=parallel.stage_layers,
        **further,
    )


def build_actor_settings(config: Config, topology: Topology) -> ActorSettings:
    """Numerics, optimizer and memory choices of the actor on this rank's device."""
    return ActorSettings(
        optimizer=config.optimizer,
        warmup_updates=config.warmup_updates,
        total_updates=(config.trainer.steps + 1 - config.first_policy_step)
        * config.updates_per_step,
        dtype=compute_dtype(config, topology),
        recompute=config.trainer.recompute,
        share_prompts=config.trainer.share_prompts,
        temperature=config.rollout.temperature,
        transformer_engine=config.model.transformer_engine,
        fp8=config.model.fp8,
        lora=config.lora,
        seed=config.seed,
        replay_routes=config.model.routing_replay != "none",
    )


def build_critic(config: Config, actor: MegatronActor) -> Critic | None:
    """Build the critic of a config, asleep; None without a critic. Collective.

    The actor sleeps meanwhile and afterwards: a device has room for the states of one of them.
    """
    section = config.critic
    if section is None:
        return None
    actor.sleep()
    topology = actor.topology
    folder = section.path or config.model.path
    rate = section.learning_rate
    lowest = rate * config.optimizer.min_learning_rate / config.optimizer.learning_rate
    optimizer = config.optimizer.model_copy(
        update={"learning_rate": rate, "min_learning_rate": lowest}
    )
    settings = replace(
        build_actor_settings(config, topology),
        optimizer=optimizer,
        total_updates=config.trainer.steps * config.updates_per_step,
        lora=section.lora,
    )
    critic = Critic(
        folder, topology=topology, settings=settings, on_micro_batch=actor.packs.on_prepare
    )
    critic.sleep()
    return critic


def build_adapter_settings(config: Config) -> AdapterSettings | None:
    """Adapters that the engine computes with; None if it receives their sums with the weights.

    Responses that keep their cache across weight syncs end with the adapters that they began with:
    the engine then has as many versions as the longest response lives through.
    """
    if config.lora is None or config.lora.push == "merged":
        return None
    keeps = config.lag.partial_rollouts is not None and config.lag.keeps_cache
    versions = config.windows if keeps else 1
    return AdapterSettings(config.lora, versions)


def compute_dtype(config: Config, topology: Topology) -> torch.dtype:
    """The dtype of weights and activations: as configured, or bfloat16 on CUDA alone."""
    if config.trainer.dtype == "auto":
        return torch.bfloat16 if topology.device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.trainer.dtype]
