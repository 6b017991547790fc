"""Held-out evaluation: k sampled responses to every problem, and their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.evaluation.scores import SetScores, score_set
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.types import Prompt, Rollout, SamplingSettings


@dataclass
class Evaluator:
    """Evaluates the engine's present weights on every configured set.

    The sampling seed does not depend on the step, so that two evaluations differ by the weights
    alone.
    """

    config: Config
    engine: RolloutEngine
    judge: Judge
    sets: Mapping[str, Sequence[Prompt]]
    recorder: Recorder
    console: Console

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """`evaluate` every `eval.every` steps and after the last one; otherwise nothing."""
        last = step == self.config.trainer.steps
        return self.evaluate(step) if last or step % self.config.eval.every == 0 else {}

    @property
    def samples(self) -> int:
        """Responses to each problem; greedy ones would all be the same."""
        return 1 if self.config.eval.temperature == 0 else self.config.eval.samples

    def evaluate(self, step: int) -> dict[str, float]:
        """The scores of every set (`megatron_rl/evaluation/scores.py`), and their macro means.

        `eval/<set>/avg@k` and so on, in [0, 1], and the mean response length.
        """
        metrics: dict[str, float] = {}
        by_name: dict[str, list[float]] = {}
        for name in self.sets:
            rollouts = self.answer(name, step)
            lengths = [len(rollout.response.token_ids) for rollout in rollouts]
            scores = self.score(rollouts)
            for score in scores.by_problem:
                metrics[f"eval/{name}/{score}"] = scores.mean(score)
                by_name.setdefault(score, []).append(scores.mean(score))
            metrics[f"eval/{name}/response_length_mean"] = sum(lengths) / len(lengths)
        return metrics | {
            f"eval_macro/{score}": sum(values) / len(values) for score, values in by_name.items()
        }

    def score(self, rollouts: Sequence[Rollout]) -> SetScores:
        """The scores of a set's rollouts."""
        return score_set([rollout.verdict for rollout in rollouts], samples=self.samples)

    def answer(self, name: str, step: int) -> list[Rollout]:
        """Judged responses to a set, problem after problem; recorded as those of `step`."""
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
                on_response=self.judge.begin(prompts, samples=self.samples),
            )
        rollouts = self.judge.finish(prompts, responses)
        self.recorder.record_evaluation(name, step, rollouts)
        return rollouts
