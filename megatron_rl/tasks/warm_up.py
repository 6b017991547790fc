"""Supervised warm-up of a small model to a wished success.

Right traces until they are learned; then noisy ones, whose rate of slips is set by what the model
was measured to solve, until the success is as wished: the model is left knowing how to do it, and
slipping where the noise was placed.
"""

import math
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.tasks.settings import TaskSettings
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
LEARNED = 0.93  # probability that a right trace has where the first part of the warm-up ends
ROUNDS = 12  # of noisy updates, at most
NOISY_UPDATES = 60  # in a round
HALVED = 500  # updates on longer traces in which the rate falls to a half: else slips remain
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


def warm_up(
    model: Any,
    tokenizer: Any,
    settings: TaskSettings,
    heldout: list[Problem],
    report: Callable[[str], None],
) -> dict[str, float]:
    """Train `model` to the wished success; returns updates, the rate of slips and the success.

    Raises ValueError if right traces are not learned in time, or the success not reached.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    generator = random.Random(f"{settings.seed} warm-up")
    updates = 0
    for size in sorted({min(settings.kind.easy, settings.size), settings.size}):
        updates += _learn_right(model, tokenizer, settings, size, optimizer, generator, report)
    decisions = sum(map(count_decisions, heldout)) / len(heldout)
    rate = -math.log(settings.success) / decisions / (1 - settings.corrected)
    for turn in range(ROUNDS):
        for step in range(NOISY_UPDATES):
            decay = 1 - 0.9 * step / NOISY_UPDATES
            optimizer.param_groups[0]["lr"] = settings.learning_rate * decay / (1 + turn)
            noise = Noise(rate, settings.noise, settings.corrected)
            update(model, optimizer, *_batch(tokenizer, settings, settings.size, generator, noise))
        updates += NOISY_UPDATES
        if settings.corrected:
            success = sample_success(model, tokenizer, heldout, settings.seed)
        else:
            success = compute_success(model, tokenizer, heldout)
        report(f"{updates} updates, slips {rate:.4f}, right {success:.3f}")
        if abs(success - settings.success) < settings.tolerance / 2:
            return {"updates": updates, "slips": rate, "success": success}
        # Success falls with the rate as exp(-decisions * rate) does.
        success = min(max(success, 0.01), 0.99)
        rate *= (math.log(settings.success) / math.log(success)) ** 0.7
    raise ValueError(
        f"success {success:.3f} after {updates} updates, not {settings.success} +- "
        f"{settings.tolerance}; try another seed or a larger model"
    )


def _learn_right(
    model: Any,
    tokenizer: Any,
    settings: TaskSettings,
    size: int,
    optimizer: torch.optim.Optimizer,
    generator: random.Random,
    report: Callable[[str], None],
) -> int:
    average = 1000.0  # of a trace's negative log-prob
    for step in range(1, settings.longest_warm_up + 1):
        decay = 1.0 if size <= settings.kind.easy else 0.5 ** (step / HALVED)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(1, step / 50) * decay
        found = update(model, optimizer, *_batch(tokenizer, settings, size, generator, Noise(0.0)))
        average = min(average + 0.1 * (found - average), 2 * found)
        if step % 50 == 0:
            report(f"size {size}: {step} updates, a right trace has log-prob {-average:.3f}")
        if average < -math.log(LEARNED):
            return step
    raise ValueError(
        f"right traces of size {size} are not learned after {step} updates (log-prob "
        f"{-average:.3f}, not above {math.log(LEARNED):.3f}); try another seed, a larger "
        "model or a longer warm-up"
    )


def _batch(
    tokenizer: Any, settings: TaskSettings, size: int, generator: random.Random, noise: Noise
) -> tuple[Tensor, Tensor]:
    count = max(
        settings.batch * _length(settings, settings.kind.easy) // _length(settings, size), 8
    )
    problems = [settings.kind.draw(generator, size) for _ in range(min(int(count), settings.batch))]
    traces = [noisy_trace(problem, noise, generator) for problem in problems]
    return encode(tokenizer, problems, traces)


@lru_cache
def _length(settings: TaskSettings, size: int) -> float:
    """Mean tokens of a question with its trace."""
    generator = random.Random(0)
    problems = [settings.kind.draw(generator, size) for _ in range(50)]
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
