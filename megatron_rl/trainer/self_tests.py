"""What must hold in every run, tried inside one every `trainer.self_test_every` steps, by name.

first_ratio          the first minibatch of a step sees ratios of exactly 1
zero_rate_weights    an update at learning rate 0 leaves every bit of every weight
zero_rate_ratios     and every ratio after it
engine_weights       after the push the engine computes the actor's log-probs
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.trial import update_at_rate_0
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import sum_over_ranks
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.trainer.rollout_batch import RolloutBatch


class SelfTestError(RuntimeError):
    """A contract of this system does not hold in this run; its results mean nothing."""


@dataclass
class SelfTests:
    """Tries the contracts in a run whose numbers it does not change.

    every: steps; None: never. check_engine: raises RuntimeError where the engine is not the actor.
    """

    every: int | None
    actor: MegatronActor
    objective: PolicyObjective
    engine: RolloutEngine
    check_engine: Callable[[], object]
    console: Console

    def before_updates(self, step: int, batch: RolloutBatch) -> None:
        """Try those of an update, on the step's first minibatch. Collective."""
        if not self._is_due(step):
            return
        deviations = []
        for _ in range(2):
            minibatch = batch.minibatches[0]
            result, stayed = update_at_rate_0(self.actor, minibatch, self.objective)
            moved = sum_over_ranks(int(not stayed), doing="the self-test zero_rate_weights")
            if moved:
                self._fail("zero_rate_weights", step, f"weights of {moved} ranks changed")
            if result.skipped is not None:
                return  # nothing was computed that could be compared
            deviations.append(result.statistics.to_metrics()["ratio/max_deviation"])
        # Not where groups are older than the policy, or ratios are to the engine.
        if batch.is_exact and deviations[0] != 0.0:
            self._fail("first_ratio", step, f"a ratio deviates from 1 by {deviations[0]:.3g}")
        if deviations[0] != deviations[1]:
            told = " and then by ".join(f"{deviation:.3g}" for deviation in deviations)
            self._fail("zero_rate_ratios", step, f"the ratios deviated from 1 by {told}")

    def after_publishing(self, step: int) -> None:
        """Try those of a push, where there was one, and say that all held. Collective."""
        if not self._is_due(step):
            return
        if self.engine.weight_version == step:
            try:
                self.check_engine()
            except RuntimeError as error:
                self._fail("engine_weights", step, str(error))
        self.console.say(f"step {step}: self-tests passed")

    def _is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def _fail(self, name: str, step: int, what: str) -> None:
        raise SelfTestError(f"self-test {name} failed in step {step}: {what}")
