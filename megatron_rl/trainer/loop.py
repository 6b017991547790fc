"""The training loop: generate, score, select, update, sync weights.

Zhang et al., "Reusing Rollouts under Policy Lag: Prefix-Normalized Policy Optimization for LLM
Reinforcement Learning", section 3.2: responses, behavior log-probs and advantages stay fixed while
a rollout batch is reused; the objective recomputes its weights at every minibatch update. Here they
are fixed when they are generated, however much later they are trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.actor.pace import gather_paces
from megatron_rl.actor.reference import References
from megatron_rl.actor.training import StopRule
from megatron_rl.config.combinations import reason_routes_unrecorded
from megatron_rl.distributed.agreement import sync_errors_across_ranks
from megatron_rl.engine.engine import GenerationStopped, WeightSink
from megatron_rl.rollouts.batch_metrics import batch_metrics
from megatron_rl.rollouts.groups import compute_all_advantages
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.schedule import LagClock
from megatron_rl.rollouts.scoring import center_on, record_routes, score_references
from megatron_rl.rollouts.source import RolloutSource, RunContext, StepInput
from megatron_rl.telemetry.metrics import StartUp
from megatron_rl.trainer.checkpointing import CheckpointKeeper
from megatron_rl.trainer.critic import CriticTrainer
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.learning_check import measure_routing
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.self_tests import SelfTests
from megatron_rl.trainer.step_progress import EarlyStopping, SkippedUpdates, StepProgress


@dataclass
class BatchSelector:
    """Selection of the groups that a step trains, from the fresh ones and the buffer.

    references: only for objectives with a KL term.
    """

    run: RunContext
    references: References | None = None

    def select(self, step: int, fresh: StepInput) -> RolloutBatch:
        """Insert fresh groups into the buffer and return the batch that `step` trains."""
        config, buffer, clock = self.run.config, self.run.buffer, self.run.clock
        with clock.phase("pack"):
            buffer.insert(fresh.groups)
            groups = buffer.select(step)
            if config.has_late_advantages:
                groups = compute_all_advantages(groups, config)
            packed = next((batch for batch in fresh.batches if batch.groups == groups), None)
            batch = (packed or self.run.pack(groups)).by_lag(step)
        if self.is_decoupled:
            with clock.phase("behavior"):
                batch = center_on(batch, self.run.actor)
        if self.references is not None:
            with clock.phase("reference"):
                objective = self.run.objective
                batch = score_references(
                    batch,
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


@dataclass
class Trainer:
    """The training loop of a run; every rank has one and runs the same program."""

    run: RunContext
    engine: WeightSink
    source: RolloutSource
    selector: BatchSelector
    evaluator: Evaluator
    checkpoints: CheckpointKeeper
    recorder: Recorder
    faults: SkippedUpdates
    critic: CriticTrainer | None = None
    start: StartUp = field(default_factory=StartUp)

    def __post_init__(self) -> None:
        self.config, self.actor, self.clock = self.run.config, self.run.actor, self.run.clock
        self.early_stopping = EarlyStopping.of(self.config)
        self.self_tests = SelfTests(self.run, self.engine, self.source)

    def train(self) -> None:
        """Run the remaining steps; evaluate before the first step of a new run."""
        done, step_progress = self.checkpoints.done, self.checkpoints.step_progress
        self.recorder.open(done, step_progress)
        losses = self.source.validate(0) if done == 0 and step_progress is None else {}
        self.sync_weights(version=done)
        self.start.ended("push")
        self.source.check()
        self.start.ended("engine_check")
        if step_progress is not None:
            self.source.resume(step_progress.step)
        elif done == 0:
            scores = losses | self.evaluator.evaluate(0)
            self.start.ended("evaluation")
            self.recorder.record({"step": 0} | scores | self.start.metrics())
        self.run.console.log(str(self.start))
        self.clock.reset()
        for step in range(done + 1, self.config.trainer.steps + 1):
            try:
                with self.clock.phase("checkpoint"):
                    self.checkpoints.stop_if_requested(self.actor)
                self.run_step(step)
            except GenerationStopped:
                self.checkpoints.checkpoint_and_exit(self.actor)

    def run_step(self, step: int) -> None:
        """Generate, score, select, train for all epochs, sync weights, evaluate and record."""
        generated = self.source.generate(step)
        self.engine.sleep()  # the device is the actor's until the next weight sync
        fresh = self.source.score(step, generated)
        batch = self.selector.select(step, fresh)
        step_progress = self.begin(step, fresh, batch)
        if self.critic is not None:
            with self.clock.phase("critic"):
                may_stop = self.source.can_resume_inside
                batch = self.critic.train(step_progress, batch, may_stop=may_stop)
        with self.clock.phase("train"):
            self.self_tests.before_updates(step, batch, done=step_progress.updates.count)
            self.actor.wake_up()  # gradients and the optimizer's state
            self.train_epochs(step_progress, batch)
        with self.clock.phase("eval"):
            losses = self.source.validate(step)  # the actor still has the device
        late = self.source.collect(step)  # from engines on ranks of their own
        with self.clock.phase("sync"):
            sync_metrics = self.sync_weights_if_due(step)
            self.self_tests.after_weight_sync(step)
        self.evaluator.start_if_due(step)
        self.source.start(step + 1)
        if late is not None:
            self.add_late(step_progress, self.source.score(step, late))
        with self.clock.phase("checkpoint"):  # before an evaluation that may fail
            self.checkpoints.save_if_due(self.actor, step)
        with self.clock.phase("eval"):
            eval_metrics = self.evaluator.evaluate_if_due(step)
        with self.clock.phase("record"):
            self.record(step_progress, batch, losses | sync_metrics | eval_metrics)
        with self.clock.phase("checkpoint"):
            self.run.buffer.evict(step, step_progress.updates.made(len(batch.minibatches)))
            self.checkpoints.finish(step)
            if self.checkpoints.saved == step:
                self.source.after_checkpoint(step)

    def begin(self, step: int, fresh: StepInput, batch: RolloutBatch) -> StepProgress:
        """Make step `step` resumable: from here on its rollouts and updates survive a restart."""
        with self.clock.phase("record"):
            new = StepProgress(step, self.actor.updates, fresh.metrics, batch)
            step_progress = self.checkpoints.begin(new, self.actor)
            if step_progress is new and reason_routes_unrecorded(self.config) is None:
                record_routes(batch, self.actor)  # a resumed step has them from its checkpoint
            self.recorder.keep_generated(step_progress, fresh, layout=self.actor.layout)
        return step_progress

    def add_late(self, step_progress: StepProgress, late: StepInput) -> None:
        """Add what was generated during a step, as if it had been before."""
        with self.clock.phase("record"):
            self.run.buffer.insert(late.groups)
            step_progress.generated = late.metrics
            self.recorder.keep_generated(step_progress, late, layout=self.actor.layout)

    def train_epochs(self, step_progress: StepProgress, batch: RolloutBatch) -> None:
        """Make the remaining updates of a step; early stopping may end them."""
        step, updates = step_progress.step, step_progress.updates
        remaining = step_progress.remaining(batch.minibatches, epochs=self.config.trainer.epochs)
        with self.run.console.progress("train") as advance:
            for epoch, minibatch in remaining:
                if self.source.can_resume_inside:
                    self.checkpoints.stop_if_requested(self.actor)
                rule = self.rule(step, epoch=epoch)
                result = self.actor.update(minibatch, self.run.objective, rule=rule)
                updates.add(result, epoch=epoch)
                self.faults.record(result, batch, step=step, update=step_progress.done)
                advance(updates.count, self.config.updates_per_step)
                if result.stopped is not None:
                    self.run.console.log(f"step {step}: stopped in epoch {epoch}: {result.stopped}")
                    break
        updates.final = updates.final or measure_routing(self.actor, batch.minibatches[-1])

    def rule(self, step: int, *, epoch: int) -> StopRule | None:
        """Return the rule that may end the updates of a step: warm-up, or early stopping."""
        if self.critic is not None and (hold := self.critic.rule(step)) is not None:
            return hold
        return None if self.early_stopping is None else self.early_stopping.rule(epoch)

    def record(
        self, step_progress: StepProgress, batch: RolloutBatch, further: Mapping[str, float]
    ) -> None:
        """Write the metrics and rollouts of a step; `further` metrics are of sync and eval."""
        step, updates = step_progress.step, step_progress.updates
        clock = LagClock(step, updates=step_progress.first_update)
        metrics = {"step": step, **step_progress.generated, **batch_metrics(batch)}
        metrics |= clock.metrics(batch.groups, self.run.buffer.groups.values())
        metrics |= {**updates.metrics(), **step_progress.critic_metrics(), **further}
        models = (self.actor,) if self.critic is None else (self.actor, self.critic.critic)
        pace = gather_paces((model.pace for model in models), topology=self.actor.topology)
        self.recorder.record(metrics, batch, clock.record(batch.groups), updates, pace)

    def sync_weights_if_due(self, step: int) -> dict[str, float]:
        """Sync weights every `lag.sync_weights_every` steps and, for evaluation, after the last."""
        if step % self.config.lag.sync_weights_every and step < self.config.trainer.steps:
            return {}
        return self.sync_weights(version=step)

    def sync_weights(self, *, version: int) -> dict[str, float]:
        """Send the actor's weights to the engine; raises unless all parameters arrive."""
        with sync_errors_across_ranks(doing="checking the weights before they are sent"):
            self.actor.check_weights()
        if self.engine.shares_devices:
            self.actor.sleep()  # the device is the engine's, which wakes up as weights arrive
        return self.engine.sync_weights(self.actor, version=version).to_metrics()
