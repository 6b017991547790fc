"""Training, as the algorithm reads: generate, judge, freeze, reuse, push weights.

Zhang et al., "Reusing Rollouts under Policy Lag: Prefix-Normalized Policy Optimization for LLM
Reinforcement Learning", section 3.2: responses, behavior log-probs and advantages stay fixed while
a rollout batch is reused; the objective recomputes its weights at every minibatch update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.engine_check import check_engine
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.faults import Faults
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.metrics import PhaseClock
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.rollout_batch import RolloutBatch, build_rollout_batch
from megatron_rl.trainer.saving import CheckpointKeeper
from megatron_rl.trainer.start_up import StartUp
from megatron_rl.trainer.update_metrics import UpdateMetrics
from megatron_rl.types import Prompt, SamplingSettings


@dataclass
class Trainer:
    """Everything one training run is made of; every rank holds one and runs the same program."""

    config: Config
    actor: MegatronActor
    reference: ReferencePolicy | None  # only where the objective has a KL term
    engine: RolloutEngine
    objective: PolicyObjective
    judge: Judge
    prompts: Sequence[Prompt]
    order: PromptOrder
    evaluator: Evaluator
    checkpoints: CheckpointKeeper
    done: int  # steps before this start; the actor is as they left it
    recorder: Recorder
    console: Console
    clock: PhaseClock
    faults: Faults
    start: StartUp = field(default_factory=StartUp)

    def train(self) -> None:
        """Run the steps that are not done; before the first of all, evaluate."""
        done = self.done
        self.recorder.open(done)
        self.push_weights(version=done)
        self.start.ended("push")
        self.check_engine()
        self.start.ended("engine_check")
        if done == 0:
            scores = self.evaluator.evaluate(0)
            self.start.ended("evaluation")
            self.recorder.record({"step": 0} | scores | self.start.metrics())
        self.console.log(str(self.start))
        self.clock.reset()
        for step in range(done + 1, self.config.trainer.steps + 1):
            with self.clock.phase("checkpoint"):
                self.checkpoints.end_if_interrupted(self.actor, step - 1)
            self.run_step(step)

    def run_step(self, step: int) -> None:
        """One rollout batch: generated once, trained on for `trainer.epochs` epochs."""
        batch = self.collect(step)

        with self.clock.phase("behavior"):
            self.engine.sleep()  # its memory is training's until the push wakes it up
            batch.freeze_behavior_logprobs(self.actor)
        if self.reference is not None:
            with self.clock.phase("reference"):
                batch.freeze_reference_logprobs(self.reference)

        updates = UpdateMetrics()
        with self.clock.phase("train"), self.console.progress("train") as advance:
            for epoch in range(1, self.config.trainer.epochs + 1):
                for minibatch in batch.minibatches:
                    result = self.actor.update(minibatch, self.objective)
                    updates.add(result, epoch=epoch)
                    self.faults.note(result, batch, step=step, update=updates.count)
                    advance(updates.count, self.config.updates_per_step)

        with self.clock.phase("sync"):
            sync_metrics = self.push_weights(version=step)

        with self.clock.phase("eval"):
            eval_metrics = self.evaluator.evaluate_if_due(step)

        with self.clock.phase("record"):
            metrics = batch.metrics() | updates.metrics() | sync_metrics | eval_metrics
            self.recorder.record({"step": step} | metrics, batch)
        with self.clock.phase("checkpoint"):
            self.checkpoints.save_if_due(self.actor, step)

    def collect(self, step: int) -> RolloutBatch:
        """Generate, judge, and pack this step's rollout batch with its advantages."""
        settings = self.config.rollout
        with self.clock.phase("rollout"), self.console.progress("rollout") as advance:
            prompts = [self.prompts[i] for i in self.order.indices(step - 1, settings.prompts)]
            responses = self.engine.generate(
                prompts,
                samples=settings.responses_per_prompt,
                sampling=SamplingSettings(
                    temperature=settings.temperature,
                    top_p=1.0,
                    max_tokens=settings.max_response_tokens,
                    seed=derive_seed(self.config.seed, "rollout", step),
                ),
                on_progress=advance,
                on_response=self.judge.begin(prompts, samples=settings.responses_per_prompt),
            )
        with self.clock.phase("reward"):  # what generating did not hide
            rollouts = self.judge.finish(prompts, responses)
        with self.clock.phase("pack"):
            return build_rollout_batch(
                rollouts,
                config=self.config,
                objective=self.objective,
                topology=self.actor.topology,
                rollout_seconds=self.clock.seconds["rollout"],
                engine_seconds=self.engine.engine_seconds,
            )

    def check_engine(self) -> None:
        """Compare log-probs before any training: checksums do not see a weight in a wrong place."""
        check_engine(
            self.actor,
            self.engine,
            self.prompts,
            temperature=self.config.rollout.temperature,
            seed=derive_seed(self.config.seed, "engine check"),
            tokens_per_micro_batch=self.config.trainer.tokens_per_micro_batch,
            max_tokens=min(32, self.config.rollout.max_response_tokens),
        )

    def push_weights(self, *, version: int) -> dict[str, float]:
        """Give the engine the actor's weights; raises if a single parameter does not arrive."""
        with raised_together(doing="looking at the weights before they are pushed"):
            self.actor.check_weights()
        self.actor.sleep()  # from here on the memory of its optimizer is the engine's
        return self.engine.push_weights(self.actor, version=version).to_metrics()
