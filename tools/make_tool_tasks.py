"""Create two tasks of two turns and a model so small that RL improves it in minutes on two cores.

Both are impossible without the environment's answer: it contains a random digit, which the last
turn must repeat. Whoever does not use it is right in a tenth of the cases (the blind ceiling).

ask: the first turn is a question mark, and the environment answers with the digit.
lookup: the prompt names a key, the first turn calls the tool `lookup` with it, and the tool returns
the key's digit in the row's table; another key has another digit.

The model is a Qwen2 of about a hundred thousand parameters with its own tokenizer. It is fine-tuned
on conversations of both tasks: first correct ones, then ones in which six of ten keys and digits
are random. So it knows the form; what RL has to find is that using the environment pays.

The output folder contains `ask` and `lookup`, each with `train.jsonl` and `heldout.jsonl`, and
`model` in Hugging Face format; a second call with the same settings does nothing.

    python -m tools.make_tool_tasks --output .cache/tool_tasks
"""

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rl.apps.tasks.tiny_task import build_model, make_folder_once, settings_parser
from tools.fine_tuning import IGNORED, PORTABLE
from tools.fine_tuning import update as train_on

DIGITS, KEYS = "0123456789", "abcdefghijklmnopqrstuvwxyz"
# Tokens are single characters and a few pieces of text.
CALL = ("<tool_call>\n", '{"name": "lookup", "arguments": {"key": "', '"}}', "\n</tool_call>")
PIECES = ["<|im_start|>", "<|im_end|>", "user", "assistant", "system", "tool", "Question ",
          " Look up ", *CALL, "\n", " ", "?", ".", *DIGITS, *KEYS]  # fmt: skip
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_TOKENS = 48


@dataclass(frozen=True)
class Settings:
    """Settings of the tasks; every field is a command line option."""

    seed: int = 1
    train: int = 1024  # prompts of each task
    heldout: int = 128
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    batch: int = 64  # conversations per update
    learning_rate: float = 3e-3
    updates: int = 150  # on correct conversations
    noisy_updates: int = 60  # on conversations that often ignore the environment
    used: float = 0.4  # probability that a symbol of these is copied, not random


class Conversation(NamedTuple):
    """One conversation: the prompt, a turn of the policy, the environment's message, the answer."""

    prompt: str
    turn: str
    role: str  # of the environment's message
    observation: str
    answer: str


def ask(number: int, digit: str, *, answer: str) -> Conversation:
    """Write a conversation of the task `ask`."""
    return Conversation(f"Question {number:03d}.", "?", "user", digit, answer)


def look_up(number: int, key: str, digit: str, *, called: str, answer: str) -> Conversation:
    """Write a conversation of the task `lookup`, in which the tool is called with `called`."""
    call = f"{CALL[0]}{CALL[1]}{called}{CALL[2]}{CALL[3]}"
    return Conversation(f"Question {number:03d}. Look up {key}.", call, "tool", digit, answer)


def draw_conversation(generator: random.Random, used: float) -> Conversation:
    """Draw a conversation; a symbol is copied with probability `used`, and random otherwise."""
    number, digit, key = generator.randrange(1000), generator.choice(DIGITS), generator.choice(KEYS)
    answer = digit if generator.random() < used else generator.choice(DIGITS)
    if generator.random() < 0.5:
        return ask(number, digit, answer=answer)
    called = key if generator.random() < used else generator.choice(KEYS)
    return look_up(number, key, digit, called=called, answer=answer)


def draw_rows(generator: random.Random, settings: Settings, task: str) -> list[dict]:
    """Draw rows with distinct prompts or answers; only the tool reads `table`."""
    rows: dict[tuple[str, str], dict] = {}
    while len(rows) < settings.train + settings.heldout:
        number, key = generator.randrange(1000), generator.choice(KEYS)
        table = {one: generator.choice(DIGITS) for one in KEYS}
        if task == "ask":
            digit = generator.choice(DIGITS)
            row = {"question": ask(number, digit, answer=digit).prompt, "answer": digit}
        else:
            prompt = look_up(number, key, "", called=key, answer="").prompt
            row = {"question": prompt, "answer": table[key], "table": table}
        rows[row["question"], row["answer"]] = row
    return list(rows.values())


def build_tokenizer():
    """Build a Qwen2 tokenizer with one token per character and piece, and a chat template.

    A byte-level BPE without merges, as in `megatron_rl/apps/tasks/tiny_task.py`.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    pieces = [PADDING, *PIECES]
    characters = {"\n": "\u010a", " ": "\u0120"}  # byte-level BPE's names of white space
    tokenizer = Qwen2Tokenizer(
        vocab={characters.get(piece, piece): index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token=PADDING,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_TOKENS,
        padding_side="left",
    )
    longer = [piece for piece in PIECES if len(piece) > 1 and "<|" not in piece]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in longer])
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == len(pieces), "an added token is missing from the vocabulary"
    return tokenizer


def split(one: Conversation) -> list[tuple[str, bool]]:
    """Split a conversation's text as the chat template writes it: (text, the policy writes it)."""
    return [
        (f"<|im_start|>user\n{one.prompt}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{one.turn}<|im_end|>", True),
        (f"\n<|im_start|>{one.role}\n{one.observation}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{one.answer}<|im_end|>", True),
    ]


def draw_batch(generator: random.Random, settings: Settings, tokenizer, used: float):
    """Draw right-padded token ids and labels of conversations; [batch, MAX_TOKENS] each."""
    import torch

    drawn = [split(draw_conversation(generator, used)) for _ in range(settings.batch)]
    texts = [text for parts in drawn for text, _ in parts]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    tokens = torch.full((settings.batch, MAX_TOKENS), tokenizer.pad_token_id)
    labels = torch.full((settings.batch, MAX_TOKENS), IGNORED)
    for row, parts in enumerate(drawn):
        place = 0
        for (_, is_written), ids in zip(parts, encoded, strict=False):
            tokens[row, place : place + len(ids)] = torch.tensor(ids)
            if is_written:
                labels[row, place : place + len(ids)] = torch.tensor(ids)
            place += len(ids)
    return tokens, labels


def train_model(model, tokenizer, settings: Settings) -> None:
    """Fine-tune the model on correct conversations, then on those that ignore the environment."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    generator = random.Random(f"{settings.seed} warm-up")
    for update in range(settings.updates + settings.noisy_updates):
        is_noisy = update >= settings.updates
        left = 1 - (update - settings.updates) / settings.noisy_updates if is_noisy else 1.0
        rate = settings.learning_rate * min(1, (update + 1) / 50) * max(left, 0.1)
        optimizer.param_groups[0]["lr"] = rate
        used = settings.used if is_noisy else 1.0
        loss = train_on(model, optimizer, *draw_batch(generator, settings, tokenizer, used))
        if update % 50 == 49:
            print(f"fine-tuning: {update + 1} updates, loss {loss:.3f}", flush=True)


def make(folder: Path, settings: Settings) -> dict:
    """Write data and model into `folder`; return the measurements."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for saving one small file
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    for task in ("ask", "lookup"):
        rows = draw_rows(random.Random(f"{settings.seed} {task}"), settings, task)
        (folder / task).mkdir()
        parts = {"heldout": rows[: settings.heldout], "train": rows[settings.heldout :]}
        for name, part in parts.items():
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (folder / task / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer, MAX_TOKENS)
    train_model(model, tokenizer, settings)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "seconds": round(time.monotonic() - start, 1)}


def make_once(output: Path, settings: Settings) -> dict:
    """Create the tasks in `output` unless they exist; return the content of made.json."""
    return make_folder_once(
        output,
        {"settings": asdict(settings), "program": Path(__file__).read_text(encoding="utf-8")},
        lambda folder: make(folder, settings),
        f"tool tasks: ask and lookup, {settings.train} + {settings.heldout} prompts each, and a "
        "model of {parameters:,} parameters",
    )


def main() -> None:
    """Run the command line."""
    parser = settings_parser(Settings, ".cache/tool_tasks", __doc__)
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    if not PORTABLE.items() <= os.environ.items():
        # Libraries read these when they are loaded, and torch is not loaded yet.
        command = [sys.executable, "-m", "tools.make_tool_tasks", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **PORTABLE})
    try:
        make_once(output, Settings(**arguments))
    except ValueError as error:
        sys.exit(f"make_tool_tasks: {error}")


if __name__ == "__main__":
    main()
