"""Builds the schedule from a config."""

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.rollouts.lag_policies import TraceLag, build_policy
from megatron_rl.rollouts.schedule import Schedule


def build_schedule(config: Config) -> Schedule:
    """Build the schedule of `lag` and `replay`; ValueError naming an invalid setting."""
    assert config.data.epochs is None, "resolve_epochs turns it into steps before"
    schedule = Schedule(
        policy=build_policy(config.lag.batches, seed=config.seed),
        seed=config.seed,
        groups=config.rollout.prompts_per_step,
        fresh=config.fresh_groups,
        steps=config.trainer.steps,
        sync_weights_every=config.lag.sync_weights_every,
        capacity=config.replay.capacity,
        sampling=config.replay.sampling,
    )
    if isinstance(schedule.policy, TraceLag):
        _check_trace(schedule.policy, schedule)
    return schedule


def _check_trace(trace: TraceLag, schedule: Schedule) -> None:
    if len(trace.lags) < schedule.steps:
        raise UserError(
            f"lag.batches.trace has {len(trace.lags)} steps, and trainer.steps={schedule.steps}; "
            "lower trainer.steps, or name a longer trace"
        )
    for step, row in enumerate(trace.lags[: schedule.steps], start=1):
        if len(row) != len(schedule.slots(step)):
            raise UserError(
                f"lag.batches.trace has {len(row)} new groups in step {step}, and this run "
                f"{len(schedule.slots(step))}; make rollout.prompts_per_step and replay.fresh "
                f"those of the "
                "recorded run"
            )
