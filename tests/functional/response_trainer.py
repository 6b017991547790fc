"""An actor that trains responses of the engine in two minibatches."""

from pathlib import Path
from typing import Any

import torch


def build_trainer(folder, layout, rollouts, **settings: Any):
    """Return (topology, actor, minibatches) of one layout; settings: of the actor, further ones."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import plan_minibatches

    topology = groups.initialise(**layout)
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=3e-3, weight_decay=0.0, epsilon=1e-4),
        warmup_updates=0,
        recompute="selective",
        overlap_reduction=topology.world_size > 1,
        **settings,
    )
    actor = MegatronActor(Path(folder), topology=topology, settings=settings)
    minibatches = plan_minibatches(
        rollouts,
        torch.linspace(-1, 1, len(rollouts)),
        minibatches=2,
        tokens_per_micro_batch=100,
        topology=topology,
    )
    return topology, actor, minibatches
