"""How the stored model of the tiny task was trained: on correct solutions, then on noisy ones.

    python -m research.tasks.tiny_model --output .cache/tiny_model

One core needs two to three minutes, with one thread and kernels that round identically on every
x86-64 processor with AVX2, so that equal settings produce equal models.
"""

import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.apps.tasks.tiny_task import (
    Problem,
    Settings,
    build_model,
    build_tokenizer,
    draw_problem,
    make_folder_once,
    settings_parser,
    write_problems,
)
from tools.fine_tuning import IGNORED, PORTABLE
from tools.fine_tuning import update as train_on

LEARNED = 0.02  # mean loss per token at which solutions are nearly always correct


@dataclass(frozen=True)
class FineTuningSettings(Settings):
    """Settings of the task and of the fine-tuning; every field is a command line option."""

    batch: int = 64  # worked solutions per update
    learning_rate: float = 3e-3
    longest_warm_up: int = 2000  # maximum updates on correct solutions; ends when they are learned
    noisy_updates: int = 100  # final updates, on solutions with wrong steps


def encode_prompts(tokenizer, problems: list[Problem]) -> list[list[int]]:
    """Return token ids of the questions with the chat template and the generation prompt."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def draw_batch(generator: random.Random, settings: FineTuningSettings, tokenizer, noise: float):
    """Draw right-padded token ids and labels of worked solutions; [batch, longest] each."""
    import torch

    problems = [draw_problem(generator, settings) for _ in range(settings.batch)]
    prompts = encode_prompts(tokenizer, problems)
    solutions = [problem.solution(generator, noise) + "<|im_end|>" for problem in problems]
    answers = tokenizer(solutions, add_special_tokens=False)["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((settings.batch, width), tokenizer.pad_token_id)
    targets = torch.full((settings.batch, width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, targets


def train_model(model, tokenizer, settings: FineTuningSettings) -> int:
    """Fine-tune the model; return the number of updates.

    Trains on correct solutions until they are learned (ValueError if they are not in time), then on
    solutions with wrong steps, so that the model makes errors at the rate of the noise.
    """
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    generator = random.Random(f"{settings.seed} warm-up")
    average = 3.0  # running mean of the loss over about 20 updates
    for update in range(settings.longest_warm_up):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(1, (update + 1) / 50)
        tokens, labels = draw_batch(generator, settings, tokenizer, 0.0)
        loss = train_on(model, optimizer, tokens, labels)  # per solution
        average += 0.05 * (loss * len(labels) / (labels != IGNORED).sum().item() - average)
        if update % 100 == 99:
            print(f"fine-tuning: {update + 1} updates, loss {average:.3f}", flush=True)
        if average < LEARNED:
            break
    else:
        raise ValueError(
            f"the solutions are not learned after {update + 1} updates (loss {average:.3f}, "
            f"not below {LEARNED}); try another seed, a larger model or a larger longest_warm_up"
        )
    for noisy in range(settings.noisy_updates):
        decay = 1 - 0.9 * noisy / settings.noisy_updates
        optimizer.param_groups[0]["lr"] = settings.learning_rate * decay
        train_on(model, optimizer, *draw_batch(generator, settings, tokenizer, settings.noise))
    return update + 1 + settings.noisy_updates


def measure_accuracy(
    model, tokenizer, problems: list[Problem], settings: FineTuningSettings
) -> float:
    """Return the fraction of correct answers among eight per problem, sampled at temperature 1."""
    import torch

    torch.manual_seed(settings.seed)
    prompts = encode_prompts(tokenizer, problems)
    width = max(map(len, prompts))
    padding = tokenizer.pad_token_id
    tokens = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    with torch.no_grad():
        output = model.generate(
            tokens,
            attention_mask=(tokens != padding).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=4 * settings.longest + 8,
            num_return_sequences=8,
        )
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    answers = [problem.answer for problem in problems for _ in range(8)]
    right = [text.endswith(f"{{{answer}}}") for text, answer in zip(texts, answers, strict=True)]
    return sum(right) / len(right)


def make(folder: Path, settings: FineTuningSettings) -> dict:
    """Write data and model into `folder`; return the measurements."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    heldout = write_problems(folder, settings)
    max_length = 8 * settings.longest + 48  # similar lengths of question and answer
    tokenizer = build_tokenizer(max_length)
    model = build_model(settings, tokenizer, max_length)
    updates = train_model(model, tokenizer, settings)
    accuracy = measure_accuracy(model.eval(), tokenizer, heldout, settings)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = round(time.monotonic() - start, 1)
    return {
        "updates": updates,
        "accuracy": round(accuracy, 4),
        "parameters": parameters,
        "seconds": seconds,
    }


def main() -> None:
    """Run the command line."""
    parser = settings_parser(FineTuningSettings, ".cache/tiny_model", __doc__)
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    if not PORTABLE.items() <= os.environ.items():
        # Libraries read these when they are loaded, and torch is not loaded yet.
        command = [sys.executable, "-m", "research.tasks.tiny_model", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **PORTABLE})
    try:
        settings = FineTuningSettings(**arguments)
        make_folder_once(
            output,
            {"settings": asdict(settings), "program": Path(__file__).read_text(encoding="utf-8")},
            lambda folder: make(folder, settings),
            "tiny model: {parameters:,} parameters right in {accuracy:.0%} of its answers",
        )
    except ValueError as error:
        sys.exit(f"tiny_model: {error}")


if __name__ == "__main__":
    main()
