"""Trial update at learning rate 0: must not change any weight, and its effects are undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.digest import digest_tensors
from megatron_rl.actor.memory import main_parameters, optimizer_parts
from megatron_rl.actor.training import UpdateResult
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.types import Minibatch


def update_at_rate_0(
    actor: MegatronActor, minibatch: Minibatch, objective: PolicyObjective
) -> tuple[UpdateResult, bool]:
    """Run an update at rate 0; return its result and whether the weights are bit-identical.

    Collective. The actor is awake afterwards. Its moments are saved on the host and restored. The
    trial is not an epoch, so it adds no row to traced packs.
    """
    actor.wake_up()
    settings, updates = actor.settings, actor.updates
    before = _digest_weights(actor)
    no_rate = {"learning_rate": 0.0, "min_learning_rate": 0.0}
    actor.settings = replace(settings, optimizer=settings.optimizer.model_copy(update=no_rate))
    try:
        untraced = [replace(pack, traced_logprobs=None) for pack in minibatch.micro_batches]
        with _preserve_moments(actor.optimizer):
            result = actor.update(replace(minibatch, micro_batches=untraced), objective)
    finally:
        actor.settings, actor.updates = settings, updates
    return result, _digest_weights(actor) == before


def _digest_weights(actor: MegatronActor) -> str:
    parameters = actor.tensors().values()
    weights = [*parameters, *main_parameters(actor.optimizer)]
    return digest_tensors(weights, device=actor.topology.device)


@contextmanager
def _preserve_moments(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Restore the optimizer's moments and step counts after the block."""
    parts = [part.optimizer for part in optimizer_parts(optimizer)]
    saved = [
        {parameter: {key: _copy(value) for key, value in state.items()}
         for parameter, state in part.state.items()}
        for part in parts
    ]  # fmt: skip
    steps = [[group.get("step") for group in part.param_groups] for part in parts]
    try:
        yield
    finally:
        for part, states, counts in zip(parts, saved, steps, strict=True):
            for parameter in [p for p in part.state if p not in states]:
                del part.state[parameter]
            for parameter, state in states.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        part.state[parameter][key].copy_(value)
                    else:
                        part.state[parameter][key] = value
            for group, count in zip(part.param_groups, counts, strict=True):
                if count is not None:
                    group["step"] = count


def _copy(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
