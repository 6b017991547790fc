"""Supervised warm-up of a small model to a wished success.

Right traces until they are learned, of easy problems first; then noisy ones, whose rate of slips is
set by what the model was measured to solve, until the success is as wished: the model is left
knowing how to do it, and slipping where the noise was placed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.tasks.settings import Draw, TaskSettings
from megatron_rl.tasks.tokens import ANSWER, END
from megatron_rl.tasks.trace import (
    Noise,
    Problem,
    count_decisions,
    noisy_trace,
    right_trace,
    verify_trace,
)

IGNORED = -100  # label of a position that is not trained on, as in torch's cross entropy
BEGUN = 0.5  # probability that a right trace has where easy problems end
LEARNED = 0.9  # and where right traces end
UNKNOWN = 1000.0  # negative log-prob of a trace, before the first update
RISING = 50  # updates in which the rate rises
HALVED = 400  # updates in which the rate falls to a half, once easy problems are learned
FALLING = 3.0  # negative log-prob of a trace below which the rate falls with its root too
LOWEST = 0.1  # of the rate
LONG = 128  # tokens of question and trace from which an update has fewer than `batch` traces
FEWEST = 2  # of them
ROUNDS = 12  # of noisy updates, at most
NOISY_UPDATES = 60  # in a round
KEPT = 200  # updates after which what has been learned is kept again
MEASURED = 2048  # sampled answers
AT_ONCE = 512  # of them
COMPUTED_AT_ONCE = 32  # right traces


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


def encode(tokenizer: Any, problems: list[Problem], traces: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and labels of questions with traces, padded on the right; [batch, longest] each."""
    prompts = [tokenizer(problem.question + ANSWER)["input_ids"] for problem in problems]
    answers = [tokenizer(trace + END)["input_ids"] for trace in traces]
    rows = list(zip(prompts, answers, strict=True))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def update(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> float:
    """One step of the optimizer; the mean over the batch of a trace's log-prob, negative."""
    # Padding stands on the right of causal attention, so no mask is needed.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    trained = labels[:, 1:] != IGNORED
    logits = model.lm_head(hidden[trained])
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
    turn: int = 0  # rounds of noisy updates done
    rate: float = 0.0  # of slips, in the next round
    success: float = 0.0  # measured after the last round


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

    def run(self) -> dict[str, float]:
        """Train to the wished success; returns updates, the rate of slips and the success.

        Raises ValueError if right traces are not learned in time, or the success not reached; what
        has been learned is kept.
        """
        now, settings = self.progress, self.settings
        easy = settings.kind.draw_easy, min(settings.kind.easy, settings.size), BEGUN
        stages = [easy, (settings.kind.draw, settings.size, LEARNED)]
        while now.stage < len(stages):
            self._learn_right(*stages[now.stage])
            now.stage, now.step, now.average = now.stage + 1, 0, UNKNOWN
        if not now.rate:
            decisions = sum(map(count_decisions, self.heldout)) / len(self.heldout)
            now.rate = -math.log(settings.success) / decisions / (1 - settings.corrected)
        for _ in range(ROUNDS):
            rate = now.rate
            self._learn_slips()
            if abs(now.success - settings.success) < settings.tolerance / 2:
                return {"updates": now.updates, "slips": rate, "success": now.success}
        self.keep(self.state)
        raise ValueError(
            f"success {now.success:.3f} after {now.updates} updates, not {settings.success} +- "
            f"{settings.tolerance}. What has been learned is kept: the same command goes on from "
            "it; or try another seed or a larger model"
        )

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

    def _learn_slips(self) -> None:
        now, settings = self.progress, self.settings
        noise = Noise(now.rate, settings.noise, settings.corrected)
        for step in range(NOISY_UPDATES):
            self._set_rate((1 - 0.9 * step / NOISY_UPDATES) / (1 + now.turn))
            self._update(settings.kind.draw, settings.size, noise)
        now.turn += 1
        if settings.corrected:
            now.success = sample_success(self.model, self.tokenizer, self.heldout, settings.seed)
        else:
            now.success = compute_success(self.model, self.tokenizer, self.heldout)
        self.report(f"{now.updates} updates, slips {now.rate:.4f}, right {now.success:.3f}")
        # Success falls with the rate as exp(-decisions * rate) does.
        success = min(max(now.success, 0.01), 0.99)
        now.rate *= (math.log(settings.success) / math.log(success)) ** 0.7
        self.keep(self.state)

    def _set_rate(self, share: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * share

    def _update(self, draw: Draw, size: int, noise: Noise) -> float:
        count = min(self.settings.batch, int(self.settings.batch * LONG / _length(draw, size)))
        problems = [draw(self.generator, size) for _ in range(max(count, FEWEST))]
        traces = [noisy_trace(problem, noise, self.generator) for problem in problems]
        self.progress.updates += 1
        return update(self.model, self.optimizer, *encode(self.tokenizer, problems, traces))


@lru_cache
def _length(draw: Draw, size: int) -> float:
    """Mean tokens of a question with its trace."""
    generator = random.Random(0)
    problems = [draw(generator, size) for _ in range(50)]
    return sum(len(problem.question) + len(right_trace(problem)) for problem in problems) / 50


@torch.no_grad()
def compute_success(model: Any, tokenizer: Any, problems: list[Problem]) -> float:
    """The mean chance of the right trace at temperature 1, uncorrected."""
    chances = []
    for start in range(0, len(problems), COMPUTED_AT_ONCE):
        some = problems[start : start + COMPUTED_AT_ONCE]
        tokens, labels = encode(tokenizer, some, [right_trace(problem) for problem in some])
        logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        trained = labels[:, 1:] != IGNORED
        chosen = labels[:, 1:].where(trained, 0)[..., None]
        own = logprobs.gather(-1, chosen)[..., 0].where(trained, 0.0)
        chances += own.sum(-1).exp().tolist()
    return sum(chances) / len(chances)


@torch.no_grad()
def sample_success(model: Any, tokenizer: Any, problems: list[Problem], seed: int) -> float:
    """The share of right answers among `MEASURED` sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    asked = [problems[number % len(problems)] for number in range(MEASURED)]
    right = 0.0
    for start in range(0, MEASURED, AT_ONCE):
        some = asked[start : start + AT_ONCE]
        truths = [right_trace(problem) for problem in some]
        given = tokenizer([p.question + ANSWER for p in some], padding=True, return_tensors="pt")
        output = model.generate(
            **given, do_sample=True, top_k=0, max_new_tokens=2 * max(map(len, truths))
        )
        answers = output[:, given["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        verdicts = [
            verify_trace(text, truth, "") for text, truth in zip(texts, truths, strict=True)
        ]
        right += sum(reward for reward, _, _ in verdicts)
    model.train()
    return right / MEASURED
