"""Supervised warm-up of a small model to a wished success.

Right traces until they are learned, of easy problems first; then noisy ones, until the model solves
less than is wished. The model that is left lies on the line between the weights before and after
the last round, where the success is as wished: it knows how to do it, and slips where the noise was
placed.
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

from megatron_rl.tasks.measuring import (
    IGNORED,
    compute_success,
    encode,
    place_slips,
    sample_success,
)
from megatron_rl.tasks.settings import TaskSettings
from megatron_rl.tasks.trace import (
    Draw,
    Noise,
    Problem,
    count_decisions,
    noisy_trace,
    right_trace,
)

BEGUN = 0.5  # probability that a right trace has where easy problems end
LEARNED = 0.9  # and where right traces end
UNKNOWN = 1000.0  # negative log-prob of a trace, before the first update
RISING = 50  # updates in which the rate rises
HALVED = 400  # updates in which the rate falls to a half, once easy problems are learned
FALLING = 3.0  # negative log-prob of a trace below which the rate falls with its root too
LOWEST = 0.1  # of the rate
LONG = 128  # tokens of question and trace from which an update has fewer than `batch` traces
FEWEST = 2  # of them
NOISY = 0.3  # share of the rate where noisy updates begin; it falls to the lowest
NOISY_UPDATES = 240  # in a round
ROUNDS = 8  # at most, in one call
CORRECTED = 0.7  # share of right answers where slips are all corrected
HALVINGS = 20  # of the line between two models
KEPT = 200  # updates after which what has been learned is kept again


def build_model(settings: TaskSettings, tokenizer: Any, max_length: int) -> Any:
    """A freshly initialised Qwen2 of the size in `settings`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=max_length,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def update(
    model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, gap: int = 0
) -> float:
    """One step of the optimizer; the mean over the batch of a trace's log-prob, negative.

    `gap` positions are left free between question and trace.
    """
    in_trace = (labels != IGNORED).cumsum(1) > 0
    positions = torch.arange(tokens.shape[1]) + gap * in_trace
    # Padding stands on the right of causal attention, so the mask hides nothing; without one,
    # transformers takes a jump of the positions for the start of another sequence.
    output = model.model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        position_ids=positions,
        use_cache=False,
    )
    trained = labels[:, 1:] != IGNORED
    logits = model.lm_head(output.last_hidden_state[:, :-1][trained])
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][trained])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() * trained.sum().item() / len(tokens)


@dataclass
class Progress:
    """How far a warm-up is."""

    updates: int = 0  # of all stages
    stage: int = 0
    step: int = 0  # updates of this stage
    average: float = UNKNOWN  # running mean of a right trace's negative log-prob


class WarmUp:
    """A model on its way to the wished success; `state` is all that it takes to go on later."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: TaskSettings,
        heldout: list[Problem],
        *,
        report: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`keep` is handed the state every now and then."""
        self.model, self.tokenizer, self.settings, self.heldout = (
            model,
            tokenizer,
            settings,
            heldout,
        )
        self.report, self.keep = report, keep
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        self.generator = random.Random(f"{settings.seed} warm-up")
        self.progress = Progress()

    @property
    def state(self) -> dict[str, Any]:
        """Of tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.getstate(),
            "progress": asdict(self.progress),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, as if there had been no end."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.setstate(state["generator"])
        self.progress = Progress(**state["progress"])

    def run(self) -> dict[str, Any]:
        """Train to the wished success; returns it, the updates, and the slips by thirds of a trace.

        Raises ValueError if right traces are not learned in time, or the success not reached; what
        has been learned is kept.
        """
        now, settings = self.progress, self.settings
        easy = settings.kind.draw_easy, min(settings.kind.easy, settings.size), BEGUN
        stages = [easy, (settings.kind.draw, settings.size, LEARNED)]
        while now.stage < len(stages):
            self._learn_right(*stages[now.stage])
            now.stage, now.step, now.average = now.stage + 1, 0, UNKNOWN
            self.keep(self.state)
        decisions = sum(map(count_decisions, self.heldout)) / len(self.heldout)
        rate = -math.log(settings.success) / decisions / (1 - settings.corrected)
        if settings.corrected and now.stage == len(stages):
            self._learn_corrections(rate)
            now.stage += 1
            self.keep(self.state)
        success = self._learn_slips(rate)
        thirds = place_slips(self.model, self.tokenizer, self.heldout)
        return {"updates": now.updates, "success": success, "slips_by_third": thirds}

    def _learn_right(self, draw: Draw, size: int, wished: float) -> None:
        now, settings = self.progress, self.settings
        for _ in range(settings.longest_warm_up):
            # Constant while the model guesses, since nobody knows for how long; low where single
            # slips remain.
            fallen = 0.5 ** (now.step / HALVED) if now.stage else 1.0
            left = max(fallen * min((now.average / FALLING) ** 0.5, 1.0), LOWEST)
            self._set_rate(min((now.step + 1) / RISING, 1.0) * left)
            found = self._update(draw, size, Noise(0.0))
            now.step += 1
            now.average = min(now.average + 0.1 * (found - now.average), 2 * found)
            if now.step % 50 == 0:
                self.report(
                    f"size {size}: {now.step} updates, a right trace has log-prob "
                    f"{-now.average:.3f}"
                )
            if now.average < -math.log(wished):
                return
            if now.step % KEPT == 0:
                self.keep(self.state)
        self.keep(self.state)
        raise ValueError(
            f"right traces of size {size} are not learned after {now.step} updates (log-prob "
            f"{-now.average:.3f}, not above {math.log(wished):.3f}). What has been learned is "
            "kept: the same command goes on from it; if the log-prob has not risen for long, try "
            "another seed, a smaller size or a larger model (--layers, --hidden)"
        )

    def _learn_corrections(self, rate: float) -> None:
        """Rounds with slips that are all corrected, until most answers are right all the same."""
        for _ in range(ROUNDS):
            self._learn_round(Noise(rate, self.settings.noise, corrected=1.0))
            success = self._measure(f"slips {rate:.4f}, all corrected")
            if success > CORRECTED:
                return
            self.keep(self.state)
        raise ValueError(
            f"corrections are not learned after {self.progress.updates} updates ({success:.3f} "
            f"right, not above {CORRECTED}). What has been learned is kept: the same command goes "
            "on from it; or try another seed or a larger model"
        )

    def _learn_slips(self, rate: float) -> float:
        """Rounds of updates until the wished success is passed; returns that of the model left."""
        wished = self.settings.success
        success = self._measure("right traces")
        for _ in range(ROUNDS):
            if self._is_wished(success):
                break
            before, above = copy.deepcopy(self.model.state_dict()), success > wished
            slips = rate if above else 0.0
            noise = Noise(slips, self.settings.noise, self.settings.corrected)
            self._learn_round(noise)
            success = self._measure(f"slips {slips:.4f}")
            if above != (success > wished) and not self._is_wished(success):
                success = self._go_between(before, above)
            else:
                self.keep(self.state)
        if not self._is_wished(success):
            raise ValueError(
                f"success {success:.3f} after {self.progress.updates} updates, not {wished} +- "
                f"{self.settings.tolerance}. What has been learned is kept: the same command goes "
                "on from it; or try another seed or a larger model"
            )
        return success

    def _learn_round(self, noise: Noise) -> None:
        for step in range(NOISY_UPDATES):
            self._set_rate(NOISY + (LOWEST - NOISY) * step / NOISY_UPDATES)
            self._update(self.settings.kind.draw, self.settings.size, noise)

    def _go_between(self, before: dict[str, Tensor], above: bool) -> float:
        """Halve the line between two models, of which `before` alone is `above` or alone is not."""
        after, low, high = copy.deepcopy(self.model.state_dict()), 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2
            between = {name: before[name].lerp(after[name], share) for name in before}
            self.model.load_state_dict(between)
            success = self._measure(f"{share:.3f} of the last round")
            if self._is_wished(success):
                return success
            if above == (success > self.settings.success):
                low = share
            else:
                high = share
        raise ValueError(
            f"tolerance={self.settings.tolerance} is finer than success can be set; the nearest "
            f"was {success:.4f}, wished {self.settings.success}: take a larger one"
        )

    def _measure(self, said: str) -> float:
        if self.settings.corrected:
            success = sample_success(self.model, self.tokenizer, self.heldout, self.settings.seed)
        else:
            success = compute_success(self.model, self.tokenizer, self.heldout)
        self.report(f"{self.progress.updates} updates, {said}: right {success:.3f}")
        return success

    def _is_wished(self, success: float) -> bool:
        return abs(success - self.settings.success) < self.settings.tolerance / 2

    def _set_rate(self, share: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * share

    def _update(self, draw: Draw, size: int, noise: Noise) -> float:
        question, trace = _lengths(draw, size)
        count = min(self.settings.batch, int(self.settings.batch * LONG / (question + trace)))
        problems = [draw(self.generator, size) for _ in range(max(count, FEWEST))]
        traces = [noisy_trace(problem, noise, self.generator) for problem in problems]
        self.progress.updates += 1
        gap = 0
        if self.settings.kind.fixed_distance:  # which is learned once for all sizes
            gap = round(_lengths(self.settings.kind.draw, self.settings.size)[0] - question)
        return update(self.model, self.optimizer, *encode(self.tokenizer, problems, traces), gap)


@lru_cache
def _lengths(draw: Draw, size: int) -> tuple[float, float]:
    """Mean tokens of a question and of its trace."""
    generator = random.Random(0)
    problems = [draw(generator, size) for _ in range(50)]
    questions, traces = zip(*((p.question, right_trace(p)) for p in problems), strict=True)
    return sum(map(len, questions)) / 50, sum(map(len, traces)) / 50
