"""Training, as the algorithm reads: collect, hold, select, update, publish.

Zhang et al., "Reusing Rollouts under Policy Lag: Prefix-Normalized Policy Optimization for LLM
Reinforcement Learning", section 3.2: responses, behavior log-probs and advantages stay fixed while
a rollout batch is reused; the objective recomputes its weights at every minibatch update. Here they
stay fixed from their generation on, whenever they are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.lag.clock import LagClock
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollout.engine import GenerationStopped, RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.collector import Collector
from megatron_rl.trainer.engine_check import check_engine
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.faults import Faults
from megatron_rl.trainer.metrics import PhaseClock
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.reuse import ReuseGuard
from megatron_rl.trainer.rollout_batch import RolloutBatch
from megatron_rl.trainer.saving import CheckpointKeeper
from megatron_rl.trainer.self_tests import SelfTests
from megatron_rl.trainer.start_up import StartUp
from megatron_rl.trainer.step_under_way import StepUnderWay


@dataclass
class Trainer:
    """Everything one training run is made of; every rank holds one and runs the same program."""

    config: Config
    actor: MegatronActor
    engine: RolloutEngine
    objective: PolicyObjective
    collector: Collector
    evaluator: Evaluator
    checkpoints: CheckpointKeeper
    done: int  # steps before this start; the actor is as they left it
    recorder: Recorder
    console: Console
    clock: PhaseClock
    faults: Faults
    reuse: ReuseGuard | None = None  # only where a signal may end it
    start: StartUp = field(default_factory=StartUp)
    self_tests: SelfTests = field(init=False)

    def __post_init__(self) -> None:
        every = self.config.trainer.self_test_every
        self.self_tests = SelfTests(
            every, self.actor, self.objective, self.engine, self.check_engine, self.console
        )

    def train(self) -> None:
        """Run the steps that are not done; before the first of all, evaluate."""
        done, under_way = self.done, self.checkpoints.under_way
        self.recorder.open(done, under_way)
        self.push_weights(version=done)
        self.start.ended("push")
        if self.collector.offline is None:
            self.check_engine()
        self.start.ended("engine_check")
        if done == 0 and under_way is None:
            scores = self.evaluator.evaluate(0)
            self.start.ended("evaluation")
            self.recorder.record({"step": 0} | scores | self.start.metrics())
        self.console.log(str(self.start))
        self.clock.reset()
        for step in range(done + 1, self.config.trainer.steps + 1):
            try:
                with self.clock.phase("checkpoint"):
                    self.checkpoints.end_if_interrupted(self.actor)
                self.run_step(step)
            except GenerationStopped:
                self.checkpoints.end(self.actor)

    def run_step(self, step: int) -> None:
        """Collect, hold, select, update, publish: one rollout batch, trained for its epochs."""
        fresh = self.collector.collect(step, resumed=self.checkpoints.under_way is not None)
        batch = self.collector.hold_and_select(step, fresh)
        under_way = self.begin(step, fresh, batch)
        updates, clock = under_way.updates, LagClock.at(step, updates=under_way.first_update)

        with self.clock.phase("train"), self.console.progress("train") as advance:
            self.self_tests.before_updates(step, batch)
            epochs = self.config.trainer.epochs
            for epoch, minibatch in under_way.remaining(batch.minibatches, epochs=epochs):
                if self.resumes_inside:
                    self.checkpoints.end_if_interrupted(self.actor)
                rule = None if self.reuse is None else self.reuse.rule(epoch)
                result = self.actor.update(minibatch, self.objective, rule=rule)
                updates.add(result, epoch=epoch)
                self.faults.note(result, batch, step=step, update=updates.count)
                advance(updates.count, self.config.updates_per_step)
                if result.stopped is not None:
                    self.console.log(f"step {step}: reuse ends in epoch {epoch}: {result.stopped}")
                    break

        with self.clock.phase("sync"):
            sync_metrics = self.publish(step)
            self.self_tests.after_publishing(step)
        with self.clock.phase("checkpoint"):  # before an evaluation that may fail
            self.checkpoints.save_if_due(self.actor, step)
        with self.clock.phase("eval"):
            eval_metrics = self.evaluator.evaluate_if_due(step)

        with self.clock.phase("record"):
            metrics = {**under_way.generated, **batch.metrics()}
            metrics |= clock.metrics(batch.groups, self.collector.buffer.groups.values())
            metrics |= updates.metrics() | sync_metrics | eval_metrics
            schedule = clock.record(batch.groups)
            self.recorder.record({"step": step} | metrics, batch, schedule, updates)
        with self.clock.phase("checkpoint"):
            self.collector.buffer.release(step, updates.made(len(batch.minibatches)))
            self.checkpoints.finish(step)
            if self.collector.in_flight is not None and self.checkpoints.saved == step:
                self.engine.forget()  # a run that continues from here has no cache either

    @property
    def resumes_inside(self) -> bool:
        """Whether a step may end between two updates, and needs nothing of the policy before."""
        return self.collector.in_flight is None and self.config.behavior == "actor"

    def begin(self, step: int, fresh: Sequence[RolloutBatch], batch: RolloutBatch) -> StepUnderWay:
        """From here on nothing that step `step` has generated or trained is lost."""
        with self.clock.phase("record"):
            generated = self.collector.metrics(fresh)
            new = StepUnderWay(step, self.actor.updates, generated, batch)
            under_way = self.checkpoints.begin(new)
            if (
                self.collector.in_flight is None
            ):  # else a checkpoint alone has all that is under way
                self.recorder.keep_generated(under_way, fresh, layout=self.actor.layout)
        return under_way

    def publish(self, step: int) -> dict[str, float]:
        """Push the weights if the schedule says so; after the last step they are evaluated."""
        if step % self.config.lag.publish_every and step < self.config.trainer.steps:
            return {}
        return self.push_weights(version=step)

    def check_engine(self) -> None:
        """Compare log-probs before any training: checksums do not see a weight in a wrong place."""
        check_engine(
            self.actor,
            self.engine,
            self.collector.prompts,
            temperature=self.config.rollout.temperature,
            seed=derive_seed(self.config.seed, "engine check"),
            tokens_per_micro_batch=self.config.trainer.tokens_per_micro_batch,
            max_tokens=min(32, self.config.rollout.max_response_tokens),
            rounded=self.config.rollout.mismatch != "none",
        )

    def push_weights(self, *, version: int) -> dict[str, float]:
        """Give the engine the actor's weights; raises if a single parameter does not arrive."""
        with raised_together(doing="looking at the weights before they are pushed"):
            self.actor.check_weights()
        self.actor.sleep()  # from here on the memory of its optimizer is the engine's
        return self.engine.push_weights(self.actor, version=version).to_metrics()
