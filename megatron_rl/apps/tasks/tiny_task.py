"""Create a task and a model so small that RL improves it in minutes on two cores.

The task is a running sum modulo 10, which needs written reasoning: `Work out 4+8-3 modulo 10.` is
answered step by step, `4+8=2-3=9` and then `\\boxed{9}`. The model is a Qwen2 of about a hundred
thousand parameters with its own tokenizer. It was fine-tuned on worked solutions, the last ones
with wrong steps, so that its answers have the right form and about a third of them are correct.

The seed determines the data. The model is stored next to this module (`tiny_model.safetensors`), so
it is the same on every machine. With `--supervised` it is random instead, of any size, and
`solutions.jsonl` and `solutions_heldout.jsonl` have conversations with worked solutions, wrong in
some steps, from which `examples/pnpo/sft.sh` trains one.

The output folder contains `train.parquet` and `heldout.parquet` in the schema of DAPO-Math-17k,
`model/` in Hugging Face format, and `made.json`. A second call with equal settings does nothing.

    python -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.runtime.versions import hide_unloadable_builds

DIGITS = "0123456789"
# Tokens are single characters, and a few words of questions.
WORDS = ["<|im_start|>", "<|im_end|>", "user", "assistant", "system", "Work out ", " modulo 10."]
SYMBOLS = ["\n", " ", "+", "-", "=", "\\boxed{", "}"]
PADDING = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SOLUTIONS = 40_960  # conversations of `--supervised`
STORED = Path(__file__).with_name("tiny_model.safetensors")


@dataclass(frozen=True)
class Settings:
    """Settings of the task; every field is a command line option."""

    seed: int = 1
    train: int = 4096  # prompts
    heldout: int = 128  # prompts, disjoint from the training set
    shortest: int = 8  # operands in a problem
    longest: int = 10
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    noise: float = 0.12  # probability of a wrong step in `solutions.jsonl`

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest:
            raise ValueError(f"need 2 <= shortest <= longest, got {self.shortest}, {self.longest}")
        if self.hidden % (32 * self.heads):  # minimum head size of vLLM's CPU attention
            raise ValueError(
                f"hidden={self.hidden} must be a multiple of 32 * heads, with heads={self.heads}"
            )
        room = sum(20 ** (count - 1) for count in range(self.shortest, self.longest + 1)) * 10
        if (self.train + self.heldout) * 2 > room:
            raise ValueError(
                f"{self.train} + {self.heldout} different problems of {self.shortest} to "
                f"{self.longest} operands are too many; there are {room}: allow more operands"
            )


@dataclass(frozen=True)
class Problem:
    """Running sum: the first operand, then (sign, operand) in order."""

    first: int
    rest: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The content of the user's message, `Work out 4 + 8 - 3 modulo 10.`"""
        steps = "".join(f" {sign} {operand}" for sign, operand in self.rest)
        return f"Work out {self.first}{steps} modulo 10."

    @property
    def answer(self) -> int:
        """The sum modulo 10, a digit."""
        return (self.first + sum(int(sign + str(operand)) for sign, operand in self.rest)) % 10

    def solution(self, generator: random.Random, noise: float) -> str:
        """Write the steps and the boxed result; each step is wrong with probability `noise`."""
        total, text = self.first, str(self.first)
        for sign, operand in self.rest:
            total = (total + int(sign + str(operand))) % 10
            if generator.random() < noise:
                total = (total + generator.randrange(1, 10)) % 10
            text += f"{sign}{operand}={total}"
        return f"{text}\n\\boxed{{{total}}}"


def draw_problem(generator: random.Random, settings: Settings) -> Problem:
    """Draw a random problem."""
    count = generator.randint(settings.shortest, settings.longest)
    rest = tuple((generator.choice("+-"), generator.randrange(10)) for _ in range(count - 1))
    return Problem(generator.randrange(10), rest)


def draw_distinct(generator: random.Random, settings: Settings, count: int) -> list[Problem]:
    """Draw `count` distinct problems."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(generator, settings)] = None
    return list(problems)


def write_parquet(path: Path, problems: list[Problem]) -> None:
    """Write problems as rows in the schema of DAPO-Math-17k."""
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


def write_problems(folder: Path, settings: Settings) -> list[Problem]:
    """Write `train.parquet` and `heldout.parquet`; return the held-out problems."""
    generator = random.Random(f"{settings.seed} problems")
    problems = draw_distinct(generator, settings, settings.heldout + settings.train)
    heldout, train = problems[: settings.heldout], problems[settings.heldout :]
    write_parquet(folder / "train.parquet", train)
    write_parquet(folder / "heldout.parquet", heldout)
    return heldout


def write_solutions(file: Path, settings: Settings, count: int) -> None:
    """Write conversations with worked solutions, wrong in some steps (`Settings.noise`)."""
    generator = random.Random(f"{settings.seed} {file.stem}")
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            problem = draw_problem(generator, settings)
            messages = [
                {"role": "user", "content": problem.question},
                {"role": "assistant", "content": problem.solution(generator, settings.noise)},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")


class ModelSize(Protocol):
    """Settings that determine the size of a model."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...


def build_model(settings: ModelSize, tokenizer: Any, max_length: int) -> Any:
    """Build a randomly initialized Qwen2 of the size in `settings`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**model_sizes(settings, tokenizer, max_length)))


def model_sizes(settings: ModelSize, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Return the config of a model of this size, as keyword arguments of its config class."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "intermediate_size": 3 * settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": max_length,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def build_tokenizer(max_length: int):
    """Build a Qwen2 tokenizer with one token per digit, symbol and word, and a chat template.

    Transformers loads the tokenizer of every `qwen2` folder as byte-level BPE regardless of its
    files, so this is a byte-level BPE without merges: single characters are bytes, and longer
    pieces are added tokens, which are matched first.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    pieces = [PADDING, *WORDS, *SYMBOLS, *DIGITS]
    characters = {"\n": "\u010a", " ": "\u0120"}  # byte-level BPE's names of white space
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
    assert len(tokenizer) == len(pieces), "an added token is missing from the vocabulary"
    return tokenizer


def make(folder: Path, settings: Settings, *, supervised: bool = False) -> dict:
    """Write data and model into `folder`; return the measurements."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for saving one small file
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    write_problems(folder, settings)
    max_length = 8 * settings.longest + 48  # similar lengths of question and answer
    tokenizer = build_tokenizer(max_length)
    model = build_model(settings, tokenizer, max_length)
    if supervised:
        write_solutions(folder / "solutions.jsonl", settings, SOLUTIONS)
        write_solutions(folder / "solutions_heldout.jsonl", settings, settings.heldout)
        measured = {"updates": 0, "accuracy": 0.0}
    else:
        measured = load_stored(model)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = round(time.monotonic() - start, 1)
    return {**measured, "parameters": parameters, "seconds": seconds}


def is_stored(settings: Settings) -> bool:
    """Return whether the stored model has these settings."""
    from safetensors import safe_open

    with safe_open(STORED, "pt") as stored:
        return asdict(settings).items() <= json.loads(stored.metadata()["settings"]).items()


def load_stored(model) -> dict:
    """Load the stored weights into `model`; return their measurements."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    model.load_state_dict(load_file(STORED))
    with safe_open(STORED, "pt") as stored:
        return json.loads(stored.metadata()["measured"])


def compute_fingerprint(settings: Settings, *, supervised: bool = False) -> str:
    """Hash the settings, this module and the stored model, which determine the output."""
    text = json.dumps(asdict(settings), sort_keys=True) + "supervised" * supervised
    parts = [text.encode(), Path(__file__).read_bytes(), STORED.read_bytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def make_once(output: Path, settings: Settings, *, supervised: bool = False) -> dict:
    """Create the task in `output` unless it exists; return the content of made.json.

    Raises ValueError for settings without a stored model, unless `supervised` leaves it random.
    """
    if not supervised and not is_stored(settings):
        given = {
            name: value
            for name, value in asdict(settings).items()
            if value != getattr(Settings, name)
        }
        raise ValueError(
            f"a trained model is stored for the default settings only, not for {given}; with "
            "--supervised the model is random, and examples/pnpo/sft.sh trains it on solutions"
        )
    stamp = {
        "fingerprint": compute_fingerprint(settings, supervised=supervised),
        "settings": asdict(settings),
    }
    return make_folder_once(
        output,
        stamp,
        lambda folder: make(folder, settings, supervised=supervised),
        f"tiny task: {settings.train} + {settings.heldout} prompts, a model of "
        "{parameters:,} parameters right in {accuracy:.0%} of its answers",
    )


def make_folder_once(
    output: Path,
    stamp: dict[str, Any],
    make: Callable[[Path], dict[str, Any]],
    summary: str,
    report: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Make a folder unless it exists with the same stamp; return the content of its made.json.

    The folder gets its name only when it is complete. `summary` is formatted with made.json and
    printed. Raises ValueError if `output` contains other files.
    """
    file, name = output / "made.json", summary.partition(":")[0]
    if file.is_file():
        made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if all(made.get(key) == value for key, value in stamp.items()):
            report(f"{name}: already in {output}")
            return made
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and contains no {name}; choose another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as parent:
        folder = Path(parent) / "made"
        folder.mkdir()
        made = stamp | make(folder)
        (folder / file.name).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    report(f"{summary.format(**made)}, in {output} ({made['seconds']:.0f} s)")
    return made


def settings_parser(settings: Any, output: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with one option per setting, and the output folder."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(output))
    for field in fields(settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    return parser


def main() -> None:
    """Run the command line."""
    parser = settings_parser(Settings, ".cache/tiny_task", __doc__)
    parser.add_argument("--supervised", action="store_true", help="Leave the model random.")
    arguments = vars(parser.parse_args())
    output, supervised = arguments.pop("output"), arguments.pop("supervised")
    try:
        settings = Settings(**arguments)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no network access
        hide_unloadable_builds()
        make_once(output, settings, supervised=supervised)
    except ValueError as error:
        sys.exit(f"tiny_task: {error}")


if __name__ == "__main__":
    main()
