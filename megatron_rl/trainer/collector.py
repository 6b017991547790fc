"""Collect, hold, select: from prompts to the rollout batch that a step trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.data.mixing import PromptMix
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.lag.buffer import GroupBuffer
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.dynamic_sampling import Answers, DynamicSampling
from megatron_rl.trainer.in_flight import InFlightGeneration
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.metrics import PhaseClock
from megatron_rl.trainer.offline import OfflineRollouts
from megatron_rl.trainer.rollout_batch import (
    RolloutBatch,
    build_groups,
    build_rollout_batch,
    generation_metrics,
)
from megatron_rl.types import Group, Prompt, SamplingSettings, Slot


@dataclass
class Collector:
    """What a rollout batch is made of and with; every rank holds one and runs the same program."""

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
    console: Console
    clock: PhaseClock
    offline: OfflineRollouts | None = None  # only where none are generated

    def __post_init__(self) -> None:
        self.sampling = DynamicSampling(self.config.dynamic_sampling.rounds)

    def collect(self, step: int, *, resumed: bool) -> list[RolloutBatch]:
        """Generate and judge what this step's weights are to generate, and freeze it.

        Behavior log-probs are computed here, while the actor still is the policy that generated,
        however much later they are trained on. A step that is `resumed` inside has begun already
        what is generated in flight.
        """
        if self.in_flight is not None and not resumed:
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
            ask=partial(self.answer_further, slots),
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

    def answer_further(self, slots: Sequence[Slot], number: int, count: int) -> Answers:
        """Responses to up to `count` further prompts, in round `number` of filling these slots.

        Each slot has a further prompt of its own: what fills others of its step asks others.
        """
        step = slots[0].step
        order = PromptOrder(len(self.prompts), derive_seed(self.config.seed, "further prompts"))
        block = (step - 1) * self.sampling.rounds + number - 1
        indices = order.indices(block, self.config.rollout.prompts)
        own = [indices[slot.group] for slot in slots][:count]
        return self.answer(own, "rollout", step, number)

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

    def metrics(self, fresh: Sequence[RolloutBatch]) -> dict[str, float]:
        """What was generated for a step, and what it cost."""
        return generation_metrics(
            fresh,
            self.sampling.take_costs(),
            seconds=self.clock.seconds.get("rollout", 0.0),
            tokens=None if self.in_flight is None else self.in_flight.new_tokens,
        )
