"""Supervised fine-tuning of a small model to a target accuracy.

The model is trained on correct solutions until it has learned them, first of easy problems, then on
noisy solutions until its accuracy is below the target. The final model interpolates between the
weights before and after the last round so that the accuracy matches the target. It solves the task
in principle and makes errors where the noise was placed.
"""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.apps.tasks.tiny_task import model_sizes
from megatron_rl.errors import UserError
from research.tasks.measuring import (
    compute_accuracy,
    encode,
    errors_by_third,
    sample_accuracy,
)
from research.tasks.settings import TaskSettings
from research.tasks.worked_solution import (
    Draw,
    Noise,
    Problem,
    correct_solution,
    count_decisions,
    noisy_solution,
)
from tools.fine_tuning import update

EASY_LEARNED = 0.5  # probability of a correct solution that ends the easy stage
LEARNED = 0.9  # probability of a correct solution that ends the second stage
INITIAL_NLL = 1000.0  # assumed negative log-prob of a solution before the first update
RISE_UPDATES = 50  # updates over which the learning rate rises
HALF_LIFE = 400  # updates that halve the learning rate, after the easy stage
DECAY_NLL = 3.0  # solution negative log-prob below which the rate decays with its square root
MIN_RATE = 0.1  # share of the learning rate
LONG = 128  # tokens of question and solution above which batches shrink
MIN_BATCH = 2  # solutions per update
NOISY_RATE = 0.3  # initial share of the learning rate in a noisy round; it falls to MIN_RATE
NOISY_UPDATES = 240  # per round
MAX_ROUNDS = 8  # in one call
CORRECTED_LEARNED = 0.7  # accuracy that ends the stage with corrected errors
MAX_BISECTIONS = 20  # between two models
SAVE_EVERY = 200  # updates between saved states


def build_mixture(settings: TaskSettings, tokenizer: Any, max_length: int) -> Any:
    """Build a randomly initialized Qwen3-MoE of the size in `settings`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **model_sizes(settings, tokenizer, max_length),
        moe_intermediate_size=3 * settings.hidden // settings.experts_per_token,
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        norm_topk_prob=True,
        head_dim=settings.hidden // settings.heads,
    )
    return Qwen3MoeForCausalLM(config)


@dataclass
class FineTuningProgress:
    """Progress of fine-tuning."""

    updates: int = 0  # in all stages
    stage: int = 0
    step: int = 0  # updates in this stage
    average: float = INITIAL_NLL  # running mean of a correct solution's negative log-prob


class FineTuning:
    """Fine-tuning of a model to the target accuracy; `state` contains all that resuming needs."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: TaskSettings,
        heldout: list[Problem],
        *,
        report: Callable[[str], None],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        """`save` is called with the state at regular intervals."""
        self.model, self.tokenizer, self.settings, self.heldout = (
            model,
            tokenizer,
            settings,
            heldout,
        )
        self.report, self.save = report, save
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        self.generator = random.Random(f"{settings.seed} warm-up")
        self.progress = FineTuningProgress()

    @property
    def state(self) -> dict[str, Any]:
        """State as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.getstate(),
            "progress": asdict(self.progress),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state, so that fine-tuning resumes exactly."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.setstate(state["generator"])
        self.progress = FineTuningProgress(**state["progress"])

    def run(self) -> dict[str, Any]:
        """Train to the target accuracy; return it, the updates, and errors by third of a solution.

        Raises UserError if correct solutions are not learned in time, or the target is not reached;
        the state is saved.
        """
        progress, settings = self.progress, self.settings
        easy = settings.kind.draw_easy, min(settings.kind.easy, settings.size), EASY_LEARNED
        stages = [easy, (settings.kind.draw, settings.size, LEARNED)]
        while progress.stage < len(stages):
            self._learn_solutions(*stages[progress.stage])
            progress.stage, progress.step, progress.average = progress.stage + 1, 0, INITIAL_NLL
            self.save(self.state)
        decisions = sum(map(count_decisions, self.heldout)) / len(self.heldout)
        rate = -math.log(settings.success) / decisions / (1 - settings.corrected)
        if settings.corrected and progress.stage == len(stages):
            self._learn_corrections(rate)
            progress.stage += 1
            self.save(self.state)
        accuracy = self._learn_errors(rate)
        thirds = errors_by_third(self.model, self.tokenizer, self.heldout)
        return {"updates": progress.updates, "success": accuracy, "slips_by_third": thirds}

    def _learn_solutions(self, draw: Draw, size: int, target: float) -> None:
        progress, settings = self.progress, self.settings
        for _ in range(settings.longest_warm_up):
            # Constant while the model guesses, because that time is unknown; low when only few
            # errors remain.
            decay = 0.5 ** (progress.step / HALF_LIFE) if progress.stage else 1.0
            rate = max(decay * min((progress.average / DECAY_NLL) ** 0.5, 1.0), MIN_RATE)
            self._set_rate(min((progress.step + 1) / RISE_UPDATES, 1.0) * rate)
            loss = self._update(draw, size, Noise(0.0))
            progress.step += 1
            progress.average = min(progress.average + 0.1 * (loss - progress.average), 2 * loss)
            if progress.step % 50 == 0:
                self.report(
                    f"size {size}: {progress.step} updates, log-prob of a correct solution "
                    f"{-progress.average:.3f}"
                )
            if progress.average < -math.log(target):
                return
            if progress.step % SAVE_EVERY == 0:
                self.save(self.state)
        self.save(self.state)
        raise UserError(
            f"correct solutions of size {size} are not learned after {progress.step} updates "
            f"(log-prob {-progress.average:.3f}, target {math.log(target):.3f}). The progress is "
            "saved: run the same command again to continue; if the log-prob has stopped rising, "
            "try another seed, a smaller size or a larger model (--layers, --hidden)"
        )

    def _learn_corrections(self, rate: float) -> None:
        """Train rounds on solutions with all errors corrected, until most answers are correct."""
        for _ in range(MAX_ROUNDS):
            self._learn_round(Noise(rate, self.settings.noise, corrected=1.0))
            accuracy = self._measure(f"error rate {rate:.4f}, all corrected")
            if accuracy > CORRECTED_LEARNED:
                return
            self.save(self.state)
        raise UserError(
            f"corrections are not learned after {self.progress.updates} updates (accuracy "
            f"{accuracy:.3f}, target {CORRECTED_LEARNED}). The progress is saved: run the same "
            "command again to continue, or try another seed or a larger model"
        )

    def _learn_errors(self, rate: float) -> float:
        """Train rounds until the target accuracy is crossed; return the final model's accuracy."""
        target = self.settings.success
        accuracy = self._measure("correct solutions")
        for _ in range(MAX_ROUNDS):
            if self._on_target(accuracy):
                break
            before, above = copy.deepcopy(self.model.state_dict()), accuracy > target
            error_rate = rate if above else 0.0
            noise = Noise(error_rate, self.settings.noise, self.settings.corrected)
            self._learn_round(noise)
            accuracy = self._measure(f"error rate {error_rate:.4f}")
            if above != (accuracy > target) and not self._on_target(accuracy):
                accuracy = self._interpolate(before, above)
            else:
                self.save(self.state)
        if not self._on_target(accuracy):
            raise UserError(
                f"accuracy {accuracy:.3f} after {self.progress.updates} updates, target {target} "
                f"+- {self.settings.tolerance}. The progress is saved: run the same command again "
                "to continue, or try another seed or a larger model"
            )
        return accuracy

    def _learn_round(self, noise: Noise) -> None:
        for step in range(NOISY_UPDATES):
            self._set_rate(NOISY_RATE + (MIN_RATE - NOISY_RATE) * step / NOISY_UPDATES)
            self._update(self.settings.kind.draw, self.settings.size, noise)

    def _interpolate(self, before: dict[str, Tensor], above: bool) -> float:
        """Bisect between the weights before and after a round that crossed the target."""
        after, low, high = copy.deepcopy(self.model.state_dict()), 0.0, 1.0
        for _ in range(MAX_BISECTIONS):
            share = (low + high) / 2
            between = {name: before[name].lerp(after[name], share) for name in before}
            self.model.load_state_dict(between)
            accuracy = self._measure(f"{share:.3f} of the last round")
            if self._on_target(accuracy):
                return accuracy
            if above == (accuracy > self.settings.success):
                low = share
            else:
                high = share
        raise UserError(
            f"tolerance={self.settings.tolerance} is too small: the nearest accuracy was "
            f"{accuracy:.4f}, target {self.settings.success}; increase tolerance"
        )

    def _measure(self, description: str) -> float:
        if self.settings.corrected:
            accuracy = sample_accuracy(self.model, self.tokenizer, self.heldout, self.settings.seed)
        else:
            accuracy = compute_accuracy(self.model, self.tokenizer, self.heldout)
        self.report(f"{self.progress.updates} updates, {description}: accuracy {accuracy:.3f}")
        return accuracy

    def _on_target(self, accuracy: float) -> bool:
        return abs(accuracy - self.settings.success) < self.settings.tolerance / 2

    def _set_rate(self, share: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * share

    def _update(self, draw: Draw, size: int, noise: Noise) -> float:
        question, solution = _lengths(draw, size)
        count = min(self.settings.batch, int(self.settings.batch * LONG / (question + solution)))
        problems = [draw(self.generator, size) for _ in range(max(count, MIN_BATCH))]
        solutions = [noisy_solution(problem, noise, self.generator) for problem in problems]
        self.progress.updates += 1
        gap = 0
        if self.settings.kind.fixed_distance:  # keep the distance of the full size
            gap = round(_lengths(self.settings.kind.draw, self.settings.size)[0] - question)
        return update(self.model, self.optimizer, *encode(self.tokenizer, problems, solutions), gap)


@lru_cache
def _lengths(draw: Draw, size: int) -> tuple[float, float]:
    """Return the mean tokens of a question and of its solution."""
    generator = random.Random(0)
    problems = [draw(generator, size) for _ in range(50)]
    questions, solutions = zip(*((p.question, correct_solution(p)) for p in problems), strict=True)
    return sum(map(len, questions)) / 50, sum(map(len, solutions)) / 50
