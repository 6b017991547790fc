"""From the settings to the schedule."""

from megatron_rl.config import Config
from megatron_rl.lag.policies import TraceLag, build_policy
from megatron_rl.lag.schedule import Schedule


def build_schedule(config: Config) -> Schedule:
    """The schedule that `lag` and `replay` describe; ValueError naming what is wrong."""
    schedule = Schedule(
        policy=build_policy(config.lag.batches, seed=config.seed),
        seed=config.seed,
        groups=config.rollout.prompts,
        fresh=config.fresh_groups,
        steps=config.trainer.steps,
        publish_every=config.lag.publish_every,
        capacity=config.replay.capacity,
        draw=config.replay.draw,
    )
    if isinstance(schedule.policy, TraceLag):
        _check_trace(schedule.policy, schedule)
    return schedule


def _check_trace(trace: TraceLag, schedule: Schedule) -> None:
    if len(trace.lags) < schedule.steps:
        raise ValueError(
            f"lag.batches.trace has {len(trace.lags)} steps, and trainer.steps={schedule.steps}; "
            "lower trainer.steps, or name a longer trace"
        )
    for step, row in enumerate(trace.lags[: schedule.steps], start=1):
        if len(row) != len(schedule.slots(step)):
            raise ValueError(
                f"lag.batches.trace has {len(row)} new groups in step {step}, and this run "
                f"{len(schedule.slots(step))}; make rollout.prompts and replay.fresh those of the "
                "recorded run"
            )
