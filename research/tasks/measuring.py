"""Tokenized worked solutions, and the accuracy of a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from research.tasks.tokens import ANSWER, END
from research.tasks.worked_solution import (
    Problem,
    correct_answer,
    correct_solution,
    verify_trace,
)
from tools.fine_tuning import IGNORED

SAMPLES = 2048  # sampled answers per measurement
SAMPLE_BATCH = 512
LOGPROB_BATCH = 32


def encode(tokenizer: Any, problems: list[Problem], solutions: list[str]) -> tuple[Tensor, Tensor]:
    """Return right-padded token ids and labels of questions and solutions [batch, longest]."""
    prompts = [tokenizer(problem.question + ANSWER)["input_ids"] for problem in problems]
    answers = [tokenizer(solution + END)["input_ids"] for solution in solutions]
    rows = list(zip(prompts, answers, strict=True))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


@torch.no_grad()
def compute_logprobs(model: Any, tokenizer: Any, problems: list[Problem]) -> Iterator[Tensor]:
    """Yield the log-probs [tokens] of each problem's correct solution."""
    for start in range(0, len(problems), LOGPROB_BATCH):
        batch = problems[start : start + LOGPROB_BATCH]
        tokens, labels = encode(tokenizer, batch, [correct_solution(problem) for problem in batch])
        logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        for row, label in zip(logprobs, labels[:, 1:], strict=True):
            trained = label != IGNORED
            yield row[trained].gather(-1, label[trained][:, None])[:, 0]


def compute_accuracy(model: Any, tokenizer: Any, problems: list[Problem]) -> float:
    """Return the mean probability of the correct solution at temperature 1, without corrections."""
    logprobs = compute_logprobs(model, tokenizer, problems)
    return sum(tokens.sum().exp().item() for tokens in logprobs) / len(problems)


def errors_by_third(model: Any, tokenizer: Any, problems: list[Problem]) -> list[float]:
    """Return each third's share of a correct solution's negative log-prob."""
    lost = [
        [third.sum() for third in logprobs.tensor_split(3)]
        for logprobs in compute_logprobs(model, tokenizer, problems)
    ]
    by_third = torch.tensor(lost).sum(0)
    return (by_third / by_third.sum()).tolist()


@torch.no_grad()
def sample_accuracy(model: Any, tokenizer: Any, problems: list[Problem], seed: int) -> float:
    """Return the fraction of correct answers among `SAMPLES` sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    requests = [problems[number % len(problems)] for number in range(SAMPLES)]
    correct = 0.0
    for start in range(0, SAMPLES, SAMPLE_BATCH):
        batch = requests[start : start + SAMPLE_BATCH]
        truths = [correct_answer(problem) for problem in batch]
        inputs = tokenizer([p.question + ANSWER for p in batch], padding=True, return_tensors="pt")
        longest = 2 * max(len(correct_solution(problem)) for problem in batch)
        output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=longest)
        answers = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        grade_results = [
            verify_trace(text, truth, "") for text, truth in zip(texts, truths, strict=True)
        ]
        correct += sum(reward for reward, _, _ in grade_results)
    model.train()
    return correct / SAMPLES
