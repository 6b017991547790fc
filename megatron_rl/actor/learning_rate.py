"""Learning rate schedule: a pure function of the update number."""

import math

from megatron_rl.actor.settings import ActorSettings


def learning_rate_at(update: int, settings: ActorSettings) -> float:
    """Return the learning rate of optimizer update number `update`, counted from 0.

    Linear warm-up reaches the full rate at update `warmup_updates - 1` (the first update has a rate
    above 0); then the rate is constant, or decays linearly or by a cosine to the minimum at the
    last update.
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
