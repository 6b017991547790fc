"""The interface between training and everything that supplies rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.config import Config
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollouts.rollout_batch import RolloutBatch, build_rollout_batch
from megatron_rl.rollouts.schedule import GroupBuffer
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.types import PromptGroup, SamplingSettings


@dataclass(frozen=True)
class RunContext:
    """Objects of one run that the rollout sources, the batch selector and the trainer share."""

    config: Config
    actor: MegatronActor
    objective: PolicyObjective
    buffer: GroupBuffer
    console: Console
    clock: PhaseClock

    @property
    def min_prompts_to_check(self) -> int:
        """Prompts without any grade that end the run: half of a usual step's, at least two."""
        return max(2, self.config.fresh_groups // 2)

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingSettings:
        """Return the settings with which rollouts are sampled."""
        rollout = self.config.rollout
        return SamplingSettings(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=max_tokens,
            seed=seed,
            top_k=rollout.top_k or 0,
            min_p=rollout.min_p,
            returns_masks=rollout.removes_tokens,
        )

    def pack(
        self, groups: Sequence[PromptGroup], *, engine_seconds: Sequence[float] = ()
    ) -> RolloutBatch:
        """Pack groups for this rank; collective, because their tokens may be on other ranks."""
        batch = build_rollout_batch(
            groups,
            config=self.config,
            objective=self.objective,
            topology=self.actor.topology,
            sharing=self.actor.sharing,
            engine_seconds=engine_seconds,
        )
        return batch if self.actor.sharing is None else batch.with_shared_rows()


@dataclass(frozen=True)
class StepInput:
    """Additions of a step to the buffer: batches with behavior log-probs, and their metrics.

    Batches generated while a step is trained are an input of that step too.
    """

    batches: Sequence[RolloutBatch]
    metrics: Mapping[str, float] = field(default_factory=dict)  # of their generation
    is_restorable: bool = True  # a restarted run may read them from disk

    @property
    def groups(self) -> list[PromptGroup]:
        """The groups of all batches."""
        return [group for batch in self.batches for group in batch.groups]


class RolloutSource(Protocol):
    """Source of the rollout batches that are trained; every rank calls it in the same order.

    `EngineSource` generates whole responses, and `PartialRolloutSource` continues them window by
    window while the weights change; `RemoteSource` and `RemotePartialSource` let engines on ranks
    of their own do the same while a step is trained. `OfflineSource` reads them from files, and
    `DemonstrationSource` takes given answers. A new way of generating is a class with these
    methods, chosen in `trainer/build.py`. Conversations with environments are responses of
    `EngineSource` and `RemoteSource` that have observed tokens.
    """

    @property
    def can_resume_inside(self) -> bool:
        """True if a step can stop between two updates and resume with the remaining updates."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if the source generates with weights other than the actor's."""
        return

    def resume(self, step: int) -> None:
        """Prepare for `generate(step)` of a step whose rollouts a checkpoint has restored."""
        return

    def generate(self, step: int) -> list[RolloutBatch]:
        """Return graded batches of the groups that the buffer is missing; the engine is awake."""
        ...

    def start(self, step: int) -> None:
        """Let engines on ranks of their own generate for `step`, if they have its weights."""
        return

    def collect(self, step: int) -> list[RolloutBatch] | None:
        """Return batches that were generated while `step` was trained; None if none were.

        They go through `score` like those of `generate`.
        """
        return None

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        """Return what this step adds to the buffer: the batches with behavior log-probs.

        The policy that generated them computes these, however much later they are trained:
        log-probs stay as they are from here on.
        """
        ...

    def validate(self, step: int) -> dict[str, float]:
        """Return losses of held-out answers under the weights after `step`, if they are due."""
        return {}

    def after_checkpoint(self, step: int) -> None:
        """Drop state that a run resumed from the checkpoint of `step` does not have."""
        return
