"""Selection of the groups that a step trains, from the buffer of generated ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.actor.reference import References
from megatron_rl.rollouts.groups import compute_all_advantages
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RunContext


@dataclass
class BatchSelector:
    """Turns fresh and buffered groups into the batch of a step.

    references: only for objectives with a KL term.
    """

    run: RunContext
    references: References | None = None

    def select(self, step: int, fresh: Sequence[RolloutBatch]) -> RolloutBatch:
        """Insert fresh groups into the buffer and return the batch that `step` trains."""
        config, buffer, clock = self.run.config, self.run.buffer, self.run.clock
        with clock.phase("pack"):
            buffer.insert(group for batch in fresh for group in batch.groups)
            groups = buffer.select(step)
            if config.has_late_advantages:
                groups = compute_all_advantages(groups, config)
            packed = next((batch for batch in fresh if batch.groups == groups), None)
            batch = packed or self.run.pack(groups)
            batch.report_by_lag(step)
        if self.is_decoupled:
            with clock.phase("behavior"):
                batch.center_on(self.run.actor)
        if self.references is not None:
            with clock.phase("reference"):
                objective = self.run.objective
                batch.freeze_reference(
                    self.references,
                    whole_vocabulary=objective.divergence is not None,
                    top_k=objective.top_k,
                )
        return batch

    @property
    def is_decoupled(self) -> bool:
        """True if ratios are to the policy before the step and a correction leads to the engine."""
        needs = self.run.objective.needs
        return self.run.config.behavior == "engine" and "rollout_logprobs" in needs
