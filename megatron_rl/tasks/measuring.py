"""Traces in tokens, and how many a model gets right."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.tasks.tokens import ANSWER, END
from megatron_rl.tasks.trace import Problem, right_answer, right_trace, verify_trace

IGNORED = -100  # label of a position that is not trained on, as in torch's cross entropy
MEASURED = 2048  # sampled answers
AT_ONCE = 512  # of them
COMPUTED_AT_ONCE = 32  # right traces


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


@torch.no_grad()
def compute_logprobs(model: Any, tokenizer: Any, problems: list[Problem]) -> Iterator[Tensor]:
    """Log-prob of each token of a problem's right trace, [tokens of it], one after another."""
    for start in range(0, len(problems), COMPUTED_AT_ONCE):
        some = problems[start : start + COMPUTED_AT_ONCE]
        tokens, labels = encode(tokenizer, some, [right_trace(problem) for problem in some])
        logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        for row, label in zip(logprobs, labels[:, 1:], strict=True):
            trained = label != IGNORED
            yield row[trained].gather(-1, label[trained][:, None])[:, 0]


def compute_success(model: Any, tokenizer: Any, problems: list[Problem]) -> float:
    """The mean chance of the right trace at temperature 1, uncorrected."""
    logprobs = compute_logprobs(model, tokenizer, problems)
    return sum(own.sum().exp().item() for own in logprobs) / len(problems)


def place_slips(model: Any, tokenizer: Any, problems: list[Problem]) -> list[float]:
    """Shares of a right trace's log-prob that are lost in each third of its tokens."""
    lost = [
        [third.sum() for third in logprobs.tensor_split(3)]
        for logprobs in compute_logprobs(model, tokenizer, problems)
    ]
    by_third = torch.tensor(lost).sum(0)
    return (by_third / by_third.sum()).tolist()


@torch.no_grad()
def sample_success(model: Any, tokenizer: Any, problems: list[Problem], seed: int) -> float:
    """The share of right answers among `MEASURED` sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    asked = [problems[number % len(problems)] for number in range(MEASURED)]
    right = 0.0
    for start in range(0, MEASURED, AT_ONCE):
        some = asked[start : start + AT_ONCE]
        truths = [right_answer(problem) for problem in some]
        given = tokenizer([p.question + ANSWER for p in some], padding=True, return_tensors="pt")
        longest = 2 * max(len(right_trace(problem)) for problem in some)
        output = model.generate(**given, do_sample=True, top_k=0, max_new_tokens=longest)
        answers = output[:, given["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        verdicts = [
            verify_trace(text, truth, "") for text, truth in zip(texts, truths, strict=True)
        ]
        right += sum(reward for reward, _, _ in verdicts)
    model.train()
    return right / MEASURED
