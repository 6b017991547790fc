"""Make a task and a model small enough that reinforcement learning shows in minutes on two cores.

The task is a running sum modulo 10, which needs written reasoning: `Work out 4+8-3 modulo 10.` is
answered step by step, `4+8=2-3=9` and then `\\boxed{9}`. The model is a Qwen2 of a few hundred
thousand parameters with a tokenizer of its own. It is warmed up by supervised training on worked
solutions, the last of them with wrong steps mixed in, so that it knows the form, is right in about
a third of its answers, and leaves room to learn.

Everything follows from the seed. The output folder holds `train.parquet` and `heldout.parquet` in
the schema of DAPO-Math-17k, `model/` in Hugging Face format, and `made.json`, which says with
which settings they were made: a second call with the same settings finds them and does nothing.

    python tools/make_tiny_task.py --output .cache/tiny_task
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

DIGITS = "0123456789"
# Tokens are single characters, and a few words that stand where a question needs them.
WORDS = ["<|im_start|>", "<|im_end|>", "user", "assistant", "system", "Work out ", " modulo 10."]
SYMBOLS = ["\n", "+", "-", "=", "\\boxed{", "}"]
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORED = -100  # label of a position that is not trained on, as in torch's cross entropy


@dataclass(frozen=True)
class Settings:
    """What decides the output; every field is an option of the command line."""

    seed: int = 1
    train: int = 4096  # prompts
    heldout: int = 128  # prompts, none of them in the training set
    shortest: int = 8  # operands in a problem
    longest: int = 10
    hidden: int = 64
    heads: int = 2
    key_value_heads: int = 2
    layers: int = 2
    intermediate: int = 192
    updates: int = 600  # of the warm-up
    batch: int = 128  # solutions per update
    learning_rate: float = 3e-3
    noisy_share: float = 0.2  # the last part of the warm-up, whose solutions have wrong steps
    noise: float = 0.12  # how often a step of those is wrong
    threads: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest:
            raise ValueError(f"need 2 <= shortest <= longest, got {self.shortest}, {self.longest}")
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of heads={self.heads}, and heads of "
                f"key_value_heads={self.key_value_heads}"
            )
        room = sum(20 ** (count - 1) for count in range(self.shortest, self.longest + 1)) * 10
        if (self.train + self.heldout) * 2 > room:
            raise ValueError(
                f"{self.train} + {self.heldout} different problems of {self.shortest} to "
                f"{self.longest} operands are too many; there are {room}: allow more operands"
            )


@dataclass(frozen=True)
class Problem:
    """One running sum: the first operand, then (sign, operand) in order."""

    first: int
    rest: tuple[tuple[str, int], ...]

    @property
    def expression(self) -> str:
        """As it stands in the question, `4+8-3`."""
        return str(self.first) + "".join(f"{sign}{operand}" for sign, operand in self.rest)

    @property
    def question(self) -> str:
        """The content of the user's message."""
        return f"Work out {self.expression} modulo 10."

    @property
    def answer(self) -> int:
        """The sum modulo 10, a digit."""
        return (self.first + sum(int(sign + str(operand)) for sign, operand in self.rest)) % 10

    def solution(self, generator: random.Random, noise: float) -> str:
        """The steps and the boxed result; each step is wrong with probability `noise`."""
        total, text = self.first, str(self.first)
        for sign, operand in self.rest:
            total = (total + int(sign + str(operand))) % 10
            if generator.random() < noise:
                total = (total + generator.randrange(1, 10)) % 10
            text += f"{sign}{operand}={total}"
        return f"{text}\n\\boxed{{{total}}}"


def draw_problem(generator: random.Random, settings: Settings) -> Problem:
    """A random problem."""
    count = generator.randint(settings.shortest, settings.longest)
    rest = tuple((generator.choice("+-"), generator.randrange(10)) for _ in range(count - 1))
    return Problem(generator.randrange(10), rest)


def draw_different(generator: random.Random, settings: Settings, count: int) -> list[Problem]:
    """`count` random problems, no two alike."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(generator, settings)] = None
    return list(problems)


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Problems as rows in the schema of DAPO-Math-17k."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "tiny_running_sum",
            "prompt": [{"content": problem.question, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
            "extra_info": {"index": str(index)},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def build_tokenizer(max_length: int):
    """A Qwen2 tokenizer with one token per digit, symbol and word, and a chat template.

    Transformers loads the tokenizer of every `qwen2` folder as byte-level BPE, whatever its files
    say, so it is one: single characters are its bytes, without merges, and longer pieces are
    added tokens, which are matched before anything else.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    pieces = [PADDING, *WORDS, *SYMBOLS, *DIGITS]
    characters = {"\n": "\u010a"}  # byte-level BPE's name of the line feed
    tokenizer = Qwen2Tokenizer(
        vocab={characters.get(piece, piece): index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token=PADDING,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=max_length,
        padding_side="left",
    )
    longer = [piece for piece in [*WORDS, *SYMBOLS] if len(piece) > 1 and "<|" not in piece]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in longer])
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == len(pieces), "an added token did not find its place"
    return tokenizer


def build_model(settings: Settings, tokenizer, max_length: int):
    """A freshly initialised Qwen2 of the size in `settings`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=max_length,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def encode_prompts(tokenizer, problems: list[Problem]) -> list[list[int]]:
    """Token ids of the questions with the chat template, ready for the answers."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def draw_batch(generator: random.Random, settings: Settings, tokenizer, noise: float):
    """Token ids and labels of worked solutions, padded on the right; two [batch, longest]."""
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


def train_model(model, tokenizer, settings: Settings) -> None:
    """Supervised warm-up: cross entropy of the solutions, the last share of them with noise."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.updates, pct_start=0.1
    )
    generator = random.Random(f"{settings.seed} warm-up")
    clean = round(settings.updates * (1 - settings.noisy_share))
    for update in report_progress(settings.updates, "warm-up"):
        noise = settings.noise if update >= clean else 0.0
        tokens, targets = draw_batch(generator, settings, tokenizer, noise)
        # Padding stands on the right of causal attention, so no mask is needed.
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        trained = targets[:, 1:] != IGNORED
        logits = model.lm_head(hidden[trained])
        loss = torch.nn.functional.cross_entropy(logits, targets[:, 1:][trained])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def measure_accuracy(model, tokenizer, problems: list[Problem], settings: Settings) -> float:
    """The share of right answers among four sampled at temperature 1 for each problem."""
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
            num_return_sequences=4,
        )
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    right = [
        text.endswith(f"\\boxed{{{problems[index // 4].answer}}}")
        for index, text in enumerate(texts)
    ]
    return sum(right) / len(right)


def report_progress(count: int, name: str) -> Iterator[int]:
    """0 .. count - 1, drawing a bar on a terminal and a line now and then into a file."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        yield from tqdm(range(count), desc=name, leave=False)
        return
    start = last = time.monotonic()
    for index in range(count):
        yield index
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{name}: {index + 1}/{count}, {last - start:.0f} s", flush=True)


def make(folder: Path, settings: Settings) -> dict:
    """Write data and model into `folder`; returns what was measured on the way."""
    import torch

    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    generator = random.Random(f"{settings.seed} problems")
    problems = draw_different(generator, settings, settings.heldout + settings.train)
    heldout, train = problems[: settings.heldout], problems[settings.heldout :]
    write_parquet(folder / "train.parquet", train)
    write_parquet(folder / "heldout.parquet", heldout)
    max_length = 8 * settings.longest + 64
    tokenizer = build_tokenizer(max_length)
    model = build_model(settings, tokenizer, max_length)
    train_model(model, tokenizer, settings)
    model.eval()
    accuracy = measure_accuracy(model, tokenizer, heldout, settings)
    model.generation_config.do_sample = True
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "accuracy": round(accuracy, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - start, 1),
    }


def compute_fingerprint(settings: Settings) -> str:
    """A hash of the settings and of this program: equal means that the output would be equal."""
    text = json.dumps(asdict(settings), sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def make_once(output: Path, settings: Settings) -> dict:
    """Make the task in `output` unless it is there already; returns the content of made.json.

    The folder appears under its name only when it is complete, so one that was interrupted is
    never taken for a finished one. Raises ValueError if `output` holds something else.
    """
    stamp = output / "made.json"
    fingerprint = compute_fingerprint(settings)
    if stamp.is_file():
        made = json.loads(stamp.read_text())
        if made["fingerprint"] == fingerprint:
            print(f"tiny task: already in {output}")
            return made
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and holds no tiny task; name another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as parent:
        folder = Path(parent) / "task"
        folder.mkdir()
        made = {"fingerprint": fingerprint, "settings": asdict(settings), **make(folder, settings)}
        (folder / stamp.name).write_text(json.dumps(made, indent=2) + "\n")
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    print(
        f"tiny task: {settings.train} + {settings.heldout} prompts, a model of "
        f"{made['parameters']:,} parameters right in {made['accuracy']:.0%} of its answers, "
        f"in {output} ({made['seconds']:.0f} s)"
    )
    return made


def main() -> None:
    """The command line: one option per setting, and where to write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(".cache/tiny_task"))
    for field in fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here, nothing is looked up
    try:
        make_once(output, Settings(**arguments))
    except ValueError as error:
        sys.exit(f"make_tiny_task: {error}")


if __name__ == "__main__":
    main()
