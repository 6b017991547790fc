"""Held-out evaluation: k sampled responses to every problem, and their scores.

With n responses to a problem, of which c are right:

    Avg@n   the mean reward
    pass@k  1 - C(n - c, k) / C(n, k): the probability that k of the n, drawn without replacement,
            contain a correct one; unbiased (Chen et al., arXiv 2107.03374, equation 1)
    maj@n   the reward of the answer that most responses give (Wang et al., arXiv 2203.11171);
            where several are given equally often, the mean over them; 0 where none gives one,
            and no score at all (nan) where no response of the whole set gives one

A response is right where its reward is at least 1. Answers are compared as the texts that the
verifier extracted. The score of a set is the mean over its problems; macro is the mean over sets,
with equal weights.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import numpy as np

from megatron_rl.config import Config
from megatron_rl.distributed.link import Link
from megatron_rl.engine.engine import ConversationSettings, RolloutEngine
from megatron_rl.engine.remote import share_rollouts
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT
from megatron_rl.rollouts.grading import Grader
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.types import GradeResult, Prompt, Rollout, SamplingSettings

RESAMPLES = 2000
SEED = 20260101  # of the resampling: the same responses have the same interval
COVERAGE = 0.95


@dataclass(frozen=True)
class ConfidenceInterval:
    """A score in [0, 1] with its interval."""

    score: float
    low: float
    high: float


@dataclass(frozen=True)
class SetScores:
    """One evaluation set: for each score its value at every problem."""

    samples: int
    by_problem: dict[str, np.ndarray]  # name, as avg@8: [problems]

    def mean(self, name: str) -> float:
        """Mean over all problems; nan if the score is undefined for one of them."""
        return fmean(self.by_problem[name].tolist())  # rounded once, under every Python


def score_set(grade_results: Sequence[GradeResult], *, samples: int) -> SetScores:
    """Scores of grade results in problem order, `samples` for each problem."""
    assert len(grade_results) % samples == 0, (
        f"{len(grade_results)} verdicts of {samples} to each problem"
    )
    groups = [
        grade_results[start : start + samples] for start in range(0, len(grade_results), samples)
    ]
    rights = [sum(grade_result.reward >= 1 for grade_result in group) for group in groups]
    values = {
        f"avg@{samples}": [_mean([grade_result.reward for grade_result in g]) for g in groups]
    }
    if samples > 1:
        for k in powers_of_two(samples):
            values[f"pass@{k}"] = [pass_at_k(samples, right, k) for right in rights]
        has_votes = any(grade_result.extracted is not None for grade_result in grade_results)
        values[f"maj@{samples}"] = [majority(group) if has_votes else math.nan for group in groups]
    return SetScores(samples, {name: np.array(column) for name, column in values.items()})


def powers_of_two(samples: int) -> list[int]:
    """2, 4, 8, ... up to the number of samples, which is the last; pass@1 is the mean of rights."""
    below = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*below, samples]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of `samples` responses contain one of the `right` responses."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(grade_results: Sequence[GradeResult]) -> float:
    """Reward of the most frequent answer; the mean over several equally frequent answers."""
    rewards: dict[str, list[float]] = {}
    for grade_result in grade_results:
        if grade_result.extracted is not None:
            rewards.setdefault(grade_result.extracted, []).append(grade_result.reward)
    most = max(map(len, rewards.values()), default=0)
    return _mean([_mean(given) for given in rewards.values() if len(given) == most])


def intervals(sets: Mapping[str, SetScores], name: str) -> dict[str, ConfidenceInterval | None]:
    """The score `name` of each set and of `macro`, with intervals by resampling problems.

    Percentile bootstrap: problems are drawn with replacement, separately for each set. None if a
    set has no such score, and for `macro` if any set has none.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    means: dict[str, float] = {}
    draws: dict[str, np.ndarray] = {}
    for one, scores in sets.items():
        values = scores.by_problem[name]
        means[one] = scores.mean(name)
        draws[one] = np.array([
            values[generator.integers(len(values), size=len(values))].mean()
            for _ in range(RESAMPLES)
        ])  # fmt: skip
    means["macro"] = _mean(list(means.values()))
    draws["macro"] = np.mean(list(draws.values()), axis=0)
    tail = 50 * (1 - COVERAGE)
    return {
        one: None
        if math.isnan(means[one])
        else ConfidenceInterval(means[one], *np.percentile(drawn, [tail, 100 - tail]).tolist())
        for one, drawn in draws.items()
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


class SetAnswers(Protocol):
    """Graded responses to evaluation sets, by engines here or on other ranks."""

    def start(self, names: Iterable[str], step: int) -> None:
        """Let engines on ranks of their own begin; their `answer` follows in the same order."""
        ...

    def answer(self, name: str, step: int) -> list[Rollout]:
        """Return the graded responses to a set, problem after problem. Collective."""
        ...

    def check(self) -> None:
        """Raise an error if no response of the last sets could be graded. Collective."""
        ...


@dataclass
class EngineAnswers:
    """Answers of an engine on this rank.

    The sampling seed does not depend on the step, so that two evaluations differ by the weights
    alone.
    """

    config: Config
    engine: RolloutEngine
    grader: Grader
    sets: Mapping[str, Sequence[Prompt]]
    console: Console
    conversations: ConversationSettings | None = None  # None: one turn

    def start(self, names: Iterable[str], step: int) -> None:
        """Do nothing: `answer` generates."""

    def answer(self, name: str, step: int) -> list[Rollout]:
        if self.conversations is not None:
            self.conversations.record(f"eval_{step:06d}")
        settings, prompts = self.config.eval, self.sets[name]
        samples = samples_of(self.config)
        with self.console.progress(f"eval {name}") as advance:
            responses = self.engine.generate(
                prompts,
                samples=samples,
                sampling=SamplingSettings(
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=self.config.rollout.max_response_tokens,
                    seed=derive_seed(self.config.seed, "eval", name),
                ),
                on_progress=advance,
                on_response=self.grader.begin(prompts, samples=samples),
                on_all_ranks=False,
                conversations=self.conversations,
            )
        return self.grader.finish(prompts, responses)

    def check(self) -> None:
        self.grader.check(prompts=2)


@dataclass
class RemoteAnswers:
    """Answers of engines on other ranks, which also grade. clock: receives their intervals."""

    link: Link
    clock: PhaseClock

    def start(self, names: Iterable[str], step: int) -> None:
        for name in names:
            self.link.orders.send("evaluate", name, step)

    def answer(self, name: str, step: int) -> list[Rollout]:
        """Wait for the rollouts of the next set in the order of `start`. Collective.

        Only the first trainer has their tokens.
        """
        rollouts, intervals = self.link.values.take() or (None, [])
        self.clock.of_engines += intervals
        return share_rollouts(rollouts)

    def check(self) -> None:
        """Do nothing: the ranks that grade raise."""


class NoAnswers:
    """Answers of a run without engines and evaluation sets."""

    def start(self, names: Iterable[str], step: int) -> None: ...

    def answer(self, name: str, step: int) -> list[Rollout]:
        raise AssertionError(f"no engine answers {name}")

    def check(self) -> None: ...


def samples_of(config: Config) -> int:
    """Return the responses to each problem: one if greedy, as all would be the same."""
    return 1 if config.eval.temperature == 0 else config.eval.samples


@dataclass
class Evaluator:
    """Evaluates the engine's present weights on every configured set. sets: their names."""

    config: Config
    answers: SetAnswers
    sets: Collection[str]
    recorder: Recorder
    console: Console
    _started: int = -1  # step whose evaluation was started last

    def is_due(self, step: int) -> bool:
        """True every `eval.every` steps and after the last step."""
        return step == self.config.trainer.steps or step % self.config.eval.every == 0

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate if it is due; otherwise return nothing."""
        return self.evaluate(step) if self.is_due(step) else {}

    def start_if_due(self, step: int) -> None:
        """Let engines on ranks of their own begin with an evaluation that is due."""
        if self.is_due(step):
            self._start(step)

    def _start(self, step: int) -> None:
        if self._started != step:
            self.answers.start(self.sets, step)
            self._started = step

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate every set; return its scores (`trainer/evaluation.py`) and their macro means.

        `eval/<set>/avg@k` and so on, in [0, 1], nan if there is no such score; also the fractions
        of `describe_responses` and the mean response length.
        """
        self._start(step)
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
        self._started = -1
        self.answers.check()
        metrics |= {f"eval_macro/{score}": _mean(values) for score, values in by_name.items()}
        best = self.config.trainer.keep_best
        if isinstance(best, str) and math.isnan(metrics.get(best, 0.0)):
            self.console.echo(
                f"trainer.keep_best={best}: no response has an answer to vote with, so this "
                f"evaluation, of step {step}, cannot be the best"
            )
        return metrics

    def score(self, rollouts: Sequence[Rollout]) -> SetScores:
        """The scores of a set's rollouts."""
        return score_set(
            [rollout.grade_result for rollout in rollouts], samples=samples_of(self.config)
        )

    def answer(self, name: str, step: int) -> list[Rollout]:
        """Record and return the responses to a set, problem after problem."""
        rollouts = self.answers.answer(name, step)
        self.recorder.record_evaluation(name, step, rollouts)
        return rollouts


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
