"""Training, as the algorithm reads: collect, hold, select, update, publish.

Zhang et al., "Reusing Rollouts under Policy Lag: Prefix-Normalized Policy Optimization for LLM
Reinforcement Learning", section 3.2: responses, behavior log-probs and advantages stay fixed while
a rollout batch is reused; the objective recomputes its weights at every minibatch update. Here they
stay fixed from their generation on, whenever they are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.data.mixing import PromptMix
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.distributed.agreement import raised_together
from megatron_rl.lag.buffer import GroupBuffer
from megatron_rl.lag.clock import LagClock
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollout.engine import GenerationStopped, RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.dynamic_sampling import Answers, DynamicSampling
from megatron_rl.trainer.engine_check import check_engine
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.faults import Faults
from megatron_rl.trainer.in_flight import InFlightGeneration
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.metrics import PhaseClock
from megatron_rl.trainer.offline import OfflineRollouts
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.reuse import ReuseGuard
from megatron_rl.trainer.rollout_batch import (
    RolloutBatch,
    build_groups,
    build_rollout_batch,
    generation_metrics,
)
from megatron_rl.trainer.saving import CheckpointKeeper
from megatron_rl.trainer.self_tests import SelfTests
from megatron_rl.trainer.start_up import StartUp
from megatron_rl.trainer.step_under_way import StepUnderWay
from megatron_rl.types import Group, Prompt, SamplingSettings, Slot


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
    order: PromptOrder | PromptMix
    buffer: GroupBuffer
    in_flight: InFlightGeneration | None  # only where weights change under generations
    evaluator: Evaluator
    checkpoints: CheckpointKeeper
    done: int  # steps before this start; the actor is as they left it
    recorder: Recorder
    console: Console
    clock: PhaseClock
    faults: Faults
    reuse: ReuseGuard | None = None  # only where a signal may end it
    offline: OfflineRollouts | None = None  # only where none are generated
    start: StartUp = field(default_factory=StartUp)
    self_tests: SelfTests = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = DynamicSampling(self.config.dynamic_sampling.rounds)
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
        if self.offline is None:
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
        fresh = self.collect(step)
        batch = self.hold_and_select(step, fresh)
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
            metrics |= clock.metrics(batch.groups, self.buffer.groups.values())
            metrics |= updates.metrics() | sync_metrics | eval_metrics
            self.recorder.record({"step": step} | metrics, batch, clock.record(batch.groups))
        with self.clock.phase("checkpoint"):
            self.buffer.release(step)
            self.checkpoints.finish(step)
            if self.in_flight is not None and self.checkpoints.saved == step:
                self.engine.forget()  # a run that continues from here has no cache either

    @property
    def resumes_inside(self) -> bool:
        """Whether a step may end between two updates, and needs nothing of the policy before."""
        return self.in_flight is None and self.config.behavior == "actor"

    def begin(self, step: int, fresh: Sequence[RolloutBatch], batch: RolloutBatch) -> StepUnderWay:
        """From here on nothing that step `step` has generated or trained is lost."""
        with self.clock.phase("record"):
            generated = generation_metrics(
                fresh, self.sampling.take_costs(), seconds=self.clock.seconds.get("rollout", 0.0)
            )
            new = StepUnderWay(step, self.actor.updates, generated, batch)
            under_way = self.checkpoints.begin(new)
            if self.in_flight is None:  # else a checkpoint alone has what is under way beside it
                self.recorder.keep_generated(under_way, fresh, layout=self.actor.layout)
        return under_way

    def collect(self, step: int) -> list[RolloutBatch]:
        """Generate and judge what this step's weights are to generate, and freeze it.

        Behavior log-probs are computed here, while the actor still is the policy that generated,
        however much later they are trained on.
        """
        if self.in_flight is not None and self.checkpoints.under_way is None:
            return self.collect_in_flight(self.in_flight, step)
        with self.clock.phase("rollout"):
            missing, spare = self.buffer.missing(step), self.buffer.spare(step)
        fresh = [batch for slots in missing for batch in self.generate(slots, spare, step)]
        with self.clock.phase("behavior"):
            self.engine.sleep()  # its memory is training's until the push wakes it up
            scorer = self.actor if self.offline is None else self.offline.scorer
            for batch in fresh:
                if self.config.behavior == "engine":
                    batch.freeze_engine_logprobs()
                elif scorer is not None:  # else a file has them
                    batch.freeze_behavior_logprobs(scorer)
        return fresh

    def collect_in_flight(self, under_way: InFlightGeneration, step: int) -> list[RolloutBatch]:
        """The same, where these weights generate only the next tokens of what is under way."""
        with self.clock.phase("rollout"):
            under_way.advance(step)
        with self.clock.phase("behavior"):
            self.engine.sleep()
            if self.config.behavior == "actor":
                under_way.freeze_new_tokens()
        with self.clock.phase("reward"):
            finished = under_way.finish(step)
        with self.clock.phase("pack"):
            seconds = tuple(self.engine.engine_seconds)
            fresh = [self.pack(groups, engine_seconds=seconds) for groups in finished]
            if self.config.behavior == "engine":
                for batch in fresh:
                    batch.freeze_engine_logprobs()
        return fresh

    def generate(self, slots: Sequence[Slot], spare: list[Slot], step: int) -> list[RolloutBatch]:
        """The groups of one step's slots, packed with their advantages.

        With dynamic sampling a second batch may follow, which fills some of the `spare` slots.
        """
        block, count = self.buffer.schedule.prompts(slots[0].step)
        if self.offline is not None:
            groups = self.offline.groups(slots, block * count, step, updates=self.actor.updates)
            return [self.offline.checked(self.pack(groups))]
        indices = self.order.indices(block, count)
        filled = self.sampling.fill(
            slots,
            self.answer([indices[slot.group] for slot in slots], "rollout", slots[0].step),
            ask=partial(self.answer_further, slots[0].step),
            spare=spare,
        )
        with self.clock.phase("pack"):
            return [
                self.pack(
                    build_groups(
                        rollouts, filling, config=self.config, step=step, updates=self.actor.updates
                    ),
                    engine_seconds=seconds,
                )
                for filling, rollouts, seconds in filled
            ]

    def answer(self, indices: Sequence[int], *use: str | int) -> Answers:
        """Responses to the prompts at `indices`, judged; `use` names their seed."""
        settings = self.config.rollout
        prompts = [self.prompts[index] for index in indices]
        with self.clock.phase("rollout"), self.console.progress("rollout") as advance:
            responses = self.engine.generate(
                prompts,
                samples=settings.responses_per_prompt,
                sampling=SamplingSettings(
                    temperature=settings.temperature,
                    top_p=1.0,
                    max_tokens=settings.max_response_tokens,
                    seed=derive_seed(self.config.seed, *use),
                ),
                on_progress=advance,
                on_response=self.judge.begin(prompts, samples=settings.responses_per_prompt),
            )
        with self.clock.phase("reward"):  # what generating did not hide
            rollouts = self.judge.finish(prompts, responses)
        return Answers.of(rollouts, settings.responses_per_prompt, self.engine.engine_seconds)

    def answer_further(self, step: int, number: int, count: int) -> Answers:
        """Responses to up to `count` further prompts, in round `number` of a step's sampling."""
        order = PromptOrder(len(self.prompts), derive_seed(self.config.seed, "further prompts"))
        block = (step - 1) * self.sampling.rounds + number - 1
        indices = order.indices(block, self.config.rollout.prompts)[:count]
        return self.answer(indices, "rollout", step, number)

    def hold_and_select(self, step: int, fresh: Sequence[RolloutBatch]) -> RolloutBatch:
        """What this step trains: what was just generated, or what is held, with its log-probs."""
        with self.clock.phase("pack"):
            self.buffer.hold(group for batch in fresh for group in batch.groups)
            groups = self.buffer.select(step)
            batch = next((one for one in fresh if one.groups == groups), None) or self.pack(groups)
            batch.report_by_lag(step)
        if self.config.behavior == "engine" and "rollout_logprobs" in self.objective.needs:
            with self.clock.phase("behavior"):
                batch.center_on(self.actor)
        if self.reference is not None:
            with self.clock.phase("reference"):
                batch.freeze_reference_logprobs(self.reference)
        return batch

    def pack(
        self, groups: Sequence[Group], *, engine_seconds: Sequence[float] = ()
    ) -> RolloutBatch:
        """The packs of groups, on this rank."""
        return build_rollout_batch(
            groups,
            config=self.config,
            objective=self.objective,
            topology=self.actor.topology,
            engine_seconds=engine_seconds,
        )

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
            self.prompts,
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
