"""The critic's part of a step: values and advantages first, then its own updates."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.actor.critic import Critic
from megatron_rl.actor.training import StopRule
from megatron_rl.config import Config
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RunContext
from megatron_rl.rollouts.values import score_values
from megatron_rl.trainer.checkpointing import CheckpointKeeper
from megatron_rl.trainer.step_progress import SkippedUpdates, StepProgress


@dataclass
class CriticTrainer:
    """Trains the critic on every rollout batch before the policy, over the same minibatches.

    Targets and advantages are constants of the step, so the order of the two does not matter; one
    after the other, each has the memory of a device for itself.
    """

    run: RunContext
    critic: Critic
    checkpoints: CheckpointKeeper
    faults: SkippedUpdates

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.run.config

    def train(
        self, step_progress: StepProgress, batch: RolloutBatch, *, may_stop: bool
    ) -> RolloutBatch:
        """Make the critic's remaining updates; returns the batch with values and advantages.

        may_stop: the step may stop between two updates (`RolloutSource.can_resume_inside`).
        """
        section = self.config.critic
        assert section is not None, "a critic has its section"
        self.run.actor.sleep()  # awake without a weight sync to an engine on the same device
        self.critic.wake_up()
        resumed = bool(step_progress.critic_results)
        batch = score_values(batch, self.critic, self.config, resumed=resumed)
        step_progress.batch = batch
        self.run.buffer.update(batch.groups)
        every = [one for _ in range(self.config.trainer.epochs) for one in batch.minibatches]
        with self.run.console.progress("critic") as advance:
            for minibatch in every[len(step_progress.critic_results) :]:
                if may_stop:
                    self.checkpoints.stop_if_requested(self.run.actor)
                result = self.critic.update(minibatch, clip=section.value_clip)
                step_progress.critic_results.append(result)
                done = len(step_progress.critic_results)
                self.faults.record(
                    result, batch, step=step_progress.step, update=done, model="critic"
                )
                advance(done, len(every))
        self.critic.sleep()
        return batch

    def rule(self, step: int) -> StopRule | None:
        """Return the rule that leaves the policy as it is in the first steps; None afterwards."""
        section = self.config.critic
        assert section is not None, "a critic has its section"
        if step >= self.config.first_policy_step:
            return None
        reason = f"the critic warms up until step {section.warmup_steps}"

        def hold(statistics: Statistics) -> str:
            return reason

        return hold
