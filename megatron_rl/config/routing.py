"""Conditions under which a run records and replays the routing of tokens to experts."""

from typing import Any


def unrecorded_because(config: Any) -> str | None:
    """Return the setting of a `Config` that prevents recording; None if routes are recorded.

    Routes stay on the ranks that compute behavior log-probs, with the packs that are trained: those
    log-probs must be the actor's, computed in the step that trains them.
    """
    if config.behavior != "actor":
        return f"behavior={config.behavior}"
    if config.lag.policy is not None:
        return f"lag.policy={config.lag.policy}"
    if config.lag.batches != 0:
        return f"lag.batches={config.lag.batches}"
    if config.lag.sync_weights_every > 1:
        return f"lag.sync_weights_every={config.lag.sync_weights_every}"
    if config.lag.partial_rollouts is not None:
        return "lag.partial_rollouts"
    if config.replay.fresh < 1:
        return f"replay.fresh={config.replay.fresh}"
    return None if config.offline.rollouts is None else "offline.rollouts"


def routing_problems(config: Any) -> list[str]:
    """List conflicts of `config.model.routing_replay` with other settings of a `Config`."""
    because = unrecorded_because(config)
    if config.model.routing_replay == "none":
        return []
    if because is None and config.model.routing_replay == "engine" and config.environment:
        return [
            f"model.routing_replay=engine cannot be combined with environment.name="
            f"{config.environment.name}: the routes of several turns are not put together; set it "
            "to behavior or none"
        ]
    if because is None:
        return []
    return [
        f"model.routing_replay={config.model.routing_replay} cannot be combined with {because}: "
        "routes are recorded only where the actor computes the behavior log-probs of the rollouts "
        "that it trains in the same step; unset one"
    ]
