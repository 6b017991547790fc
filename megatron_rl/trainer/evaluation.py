"""Held-out evaluation: Avg@k, the mean correctness of k sampled responses per problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.console import Console
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.seeds import derive_seed
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.types import Prompt, SamplingSettings


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

    def evaluate(self, step: int) -> dict[str, float]:
        """`eval/<set>/avg@k` in [0, 1] of every set, and the mean response length."""
        settings = self.config.eval
        samples = 1 if settings.temperature == 0 else settings.samples  # all would be the same
        metrics: dict[str, float] = {}
        for name, prompts in self.sets.items():
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
                    on_response=self.judge.begin(prompts, samples=samples),
                )
            rollouts = self.judge.finish(prompts, responses)
            rewards = [rollout.verdict.reward for rollout in rollouts]
            lengths = [len(rollout.response.token_ids) for rollout in rollouts]
            metrics[f"eval/{name}/avg@{samples}"] = sum(rewards) / len(rewards)
            metrics[f"eval/{name}/response_length_mean"] = sum(lengths) / len(lengths)
            self.recorder.record_evaluation(name, step, rollouts)
        return metrics
