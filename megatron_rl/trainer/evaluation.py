"""Held-out evaluation: k sampled responses to every problem, and their scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from megatron_rl.config import Config
from megatron_rl.engine.engine import ConversationSettings, RolloutEngine
from megatron_rl.engine.remote import RemoteEngine
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT
from megatron_rl.rollouts.grading import Grader
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.telemetry.console import Console
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.scores import SetScores, score_set
from megatron_rl.types import Prompt, Rollout, SamplingSettings


@dataclass
class Evaluator:
    """Evaluates the engine's present weights on every configured set.

    The sampling seed does not depend on the step, so that two evaluations differ by the weights
    alone.
    """

    config: Config
    engine: RolloutEngine
    grader: Grader
    sets: Mapping[str, Sequence[Prompt]]
    recorder: Recorder
    console: Console
    conversations: ConversationSettings | None = None  # None: one turn

    def is_due(self, step: int) -> bool:
        """True every `eval.every` steps and after the last one."""
        return step == self.config.trainer.steps or step % self.config.eval.every == 0

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate if it is due; otherwise return nothing."""
        return self.evaluate(step) if self.is_due(step) else {}

    def start_if_due(self, step: int) -> None:
        """Let engines on ranks of their own begin with an evaluation that is due."""

    @property
    def samples(self) -> int:
        """Responses to each problem: one if greedy, as all would be the same."""
        return 1 if self.config.eval.temperature == 0 else self.config.eval.samples

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate every set; return its scores (`trainer/scores.py`) and their macro means.

        `eval/<set>/avg@k` and so on, in [0, 1], nan if there is no such score; also the fractions
        of `describe_responses` and the mean response length.
        """
        if self.conversations is not None:
            self.conversations.record(f"eval_{step:06d}")
        metrics: dict[str, float] = {}
        by_name: dict[str, list[float]] = {}
        for name in self.sets:
            rollouts = self.answer(name, step)
            scores = self.score(rollouts)
            for score in scores.by_problem:
                metrics[f"eval/{name}/{score}"] = scores.mean(score)
                by_name.setdefault(score, []).append(scores.mean(score))
            described = describe_responses(rollouts)
            metrics |= {f"eval/{name}/{key}": value for key, value in described.items()}
            if (ungraded := described[TIME_LIMIT_KEY] + described[FAILED_KEY]) > 0:
                self.console.echo(
                    f"eval {name}: {ungraded:.2%} of the responses were not graded (time limit "
                    f"{described[TIME_LIMIT_KEY]:.2%}, verifier failed {described[FAILED_KEY]:.2%})"
                    " and count as wrong"
                )
        if self.engine.shares_devices:  # else the ranks that grade do this
            self.grader.check(prompts=2)
        metrics |= {
            f"eval_macro/{score}": sum(values) / len(values) for score, values in by_name.items()
        }
        best = self.config.trainer.keep_best
        if isinstance(best, str) and math.isnan(metrics.get(best, 0.0)):
            self.console.echo(
                f"trainer.keep_best={best}: no response has an answer to vote with, so this "
                f"evaluation, of step {step}, cannot be the best"
            )
        return metrics

    def score(self, rollouts: Sequence[Rollout]) -> SetScores:
        """The scores of a set's rollouts."""
        return score_set([rollout.grade_result for rollout in rollouts], samples=self.samples)

    def answer(self, name: str, step: int) -> list[Rollout]:
        """Generate, grade and record responses to a set, problem after problem."""
        rollouts = self.generate(name)
        self.recorder.record_evaluation(name, step, rollouts)
        return rollouts

    def generate(self, name: str) -> list[Rollout]:
        """Generate and grade responses to a set."""
        settings, prompts = self.config.eval, self.sets[name]
        with self.console.progress(f"eval {name}") as advance:
            responses = self.engine.generate(
                prompts,
                samples=self.samples,
                sampling=SamplingSettings(
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=self.config.rollout.max_response_tokens,
                    seed=derive_seed(self.config.seed, "eval", name),
                ),
                on_progress=advance,
                on_response=self.grader.begin(prompts, samples=self.samples),
                everywhere=False,
                conversations=self.conversations,
            )
        return self.grader.finish(prompts, responses)


@dataclass
class RemoteEvaluator(Evaluator):
    """Evaluates on engines of other ranks, which also grade."""

    _is_started: bool = False

    @property
    def remote(self) -> RemoteEngine:
        """The engine, which is one of other ranks."""
        return cast(RemoteEngine, self.engine)

    def start_if_due(self, step: int) -> None:
        if self.is_due(step):
            self._start()

    def _start(self) -> None:
        for name in self.sets:
            self.remote.link.order("evaluate", name)
        self._is_started = True

    def evaluate(self, step: int) -> dict[str, float]:
        if not self._is_started:  # before the first step
            self._start()
        self._is_started = False
        return super().evaluate(step)

    def generate(self, name: str) -> list[Rollout]:
        return self.remote.evaluated()


TIME_LIMIT_KEY, FAILED_KEY = "time_limit_fraction", "failed_fraction"


def describe_responses(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Fractions of ungraded and of truncated responses, and the mean length."""
    reasons = [rollout.grade_result.reason for rollout in rollouts]
    cut = sum(rollout.response.finish_reason == "length" for rollout in rollouts)
    return {
        TIME_LIMIT_KEY: reasons.count(TIME_LIMIT) / len(rollouts),
        FAILED_KEY: reasons.count(FAILED) / len(rollouts),
        "truncated_fraction": cut / len(rollouts),
        "response_length_mean": sum(r.response.length for r in rollouts) / len(rollouts),
    }
