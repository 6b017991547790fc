"""The learning rate of each optimizer update, a pure function of its number."""

import math

from megatron_rl.actor.settings import ActorSettings


def learning_rate_at(update: int, settings: ActorSettings) -> float:
    """The rate of the `update`-th optimizer update, counted from 0.

    Linear warm-up reaches the full rate at update `warmup_updates - 1` (the first update already
    moves); then constant, or a linear or cosine decay that reaches the minimum at the last update.
    """
    done = update + 1
    if done <= settings.warmup_updates:
        return settings.learning_rate * done / settings.warmup_updates
    span = max(1, settings.total_updates - settings.warmup_updates)
    progress = min(1.0, (done - settings.warmup_updates) / span)
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[settings.decay]
    lowest = settings.min_learning_rate if settings.decay != "constant" else 0.0
    return lowest + (settings.learning_rate - lowest) * remaining
