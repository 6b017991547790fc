"""Self-tests: invariants of every run, tested every `trainer.self_test_every` steps.

first_ratio          all ratios of the first minibatch of a step are exactly 1
zero_rate_weights    an update at learning rate 0 changes no bit of any weight
zero_rate_ratios     nor any ratio after it
engine_weights       after a weight sync the engine computes the actor's log-probs
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.actor.trial import update_at_rate_0
from megatron_rl.distributed.agreement import sum_over_ranks
from megatron_rl.engine.engine import WeightSink
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.source import RolloutSource, RunContext

OF_UPDATES = ("first_ratio", "zero_rate_weights", "zero_rate_ratios")


class SelfTestError(RuntimeError):
    """An invariant is violated in this run; its results are meaningless."""


@dataclass
class SelfTests:
    """Tests the invariants in a run without changing its numbers, and reports the result.

    They run every `trainer.self_test_every` steps; None disables them.
    """

    run: RunContext
    engine: WeightSink
    source: RolloutSource
    _passed: list[str] = field(default_factory=list)  # of the present step
    _untried: dict[str, str] = field(default_factory=dict)  # why the others could not be compared

    def before_updates(self, step: int, batch: RolloutBatch, *, done: int) -> None:
        """Run the tests of an update on the step's first minibatch. Collective.

        done: updates of this step before a resume. After the first one the policy has moved,
        and these tests do not apply.
        """
        if not self._is_due(step):
            return
        self._passed, self._untried = [], {}
        if done:
            self._skip(OF_UPDATES, f"the run was resumed after update {done} of the step")
            return
        deviations = []
        for _ in range(2):
            minibatch = batch.minibatches[0]
            result, stayed = update_at_rate_0(self.run.actor, minibatch, self.run.objective)
            moved = sum_over_ranks(int(not stayed), doing="the self-test zero_rate_weights")
            if moved:
                self._fail("zero_rate_weights", step, f"weights of {moved} ranks changed")
            if result.skipped is not None:  # without an optimizer step
                self._skip(OF_UPDATES, f"the trial update was skipped: {result.skipped}")
                return
            metrics = result.statistics.to_metrics()
            deviations.append(metrics["ratio/max_deviation"])
        if not metrics["tokens"]:
            self._skip(["first_ratio", "zero_rate_ratios"], "the first minibatch has no token that "
                       "is computed: all of its advantages are 0")  # fmt: skip
        elif not batch.is_exact:
            self._skip(["first_ratio"], "the log-probs of this batch were not computed in this "
                       "step by this policy: lag, replay, a resume or behavior=engine")  # fmt: skip
        elif deviations[0] != 0.0:
            self._fail("first_ratio", step, f"a ratio deviates from 1 by {deviations[0]:.3g}")
        if deviations[0] != deviations[1]:
            messages = " and then by ".join(f"{deviation:.3g}" for deviation in deviations)
            self._fail("zero_rate_ratios", step, f"the ratios deviated from 1 by {messages}")
        self._passed += [name for name in OF_UPDATES if name not in self._untried]

    def after_weight_sync(self, step: int) -> None:
        """Run the test of a weight sync and report all tests of the step. Collective."""
        if not self._is_due(step):
            return
        if self.engine.weight_version == step:
            try:
                self.source.check()
            except RuntimeError as error:
                self._fail("engine_weights", step, str(error))
            self._passed.append("engine_weights")
        else:
            self._skip(["engine_weights"], "no weights were pushed in this step")
        self.run.console.echo(
            f"step {step}: self-tests passed: {', '.join(self._passed) or 'none'}"
        )
        for reason in dict.fromkeys(self._untried.values()):
            names = [name for name, why in self._untried.items() if why == reason]
            self.run.console.echo(f"step {step}: not compared: {', '.join(names)} ({reason})")

    def _is_due(self, step: int) -> bool:
        every = self.run.config.trainer.self_test_every
        return every is not None and step % every == 0

    def _skip(self, names: Iterable[str], reason: str) -> None:
        self._untried |= dict.fromkeys(names, reason)

    def _fail(self, name: str, step: int, what: str) -> None:
        raise SelfTestError(f"self-test {name} failed in step {step}: {what}")
