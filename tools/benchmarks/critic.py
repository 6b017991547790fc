"""A critic next to group baselines at equal generated tokens: where it helps, and where not.

    python -m tools.benchmarks.critic [--task doors marks level sums] [--seeds 1 2 3 4]

`doors`: a conversation of five turns. The first one opens a door, any letter. The environment then
names four digits, one in each turn, and the next higher digit earns 1/16. Half of the doors, drawn
again for each prompt and step, have a prize of 1 at the end, whatever the answers are: the digits
behind them are 5 to 9, behind the others 0 to 4. A group has conversations behind doors of both
kinds, so the luck of the door is in every advantage over the group; a critic reads it.

`marks`: the same, but a letter after the digit shows the prize. `level`: no door has a prize.

`sums`: the quickstart's problems, one turn and one reward at its end.

All runs of a task have the same model, prompts, number of responses, objective and optimizer; the
learning rate of each way was chosen on seed 100 of `doors` and of `sums`. Runs are those of
`megatron-rl train`: a second call continues where the first one ended, and prints the table.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megatron_rl.environments import Answer
from megatron_rl.runs.files import read_metrics
from tools.make_tool_tasks import DIGITS, KEYS

ROOT = Path(__file__).parents[2]
QUESTIONS = 4  # turns after the door
RIGHT, PRIZE = 1 / 16, 1.0  # rewards of a right answer, and behind half of the doors at the end
MAX_TOKENS = 80


def next_digit(digit: str) -> str:
    """Return the right answer to a digit."""
    return str((int(digit) + 1) % 10)


class Doors:
    """A door, and behind it digits to answer; the door decides whether a prize follows."""

    prize = PRIZE

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.seed, self.turns, self.right = seed, 0, ""

    async def step(self, message: str) -> Answer:
        """Grade the answer, and name the next digit."""
        if not self.turns:
            # All conversations about a prompt share the seed: the draw differs by the door.
            self.draw = random.Random(f"{self.seed} {message}")
            self.pays = self.draw.random() < 0.5
        is_last = self.turns == QUESTIONS
        reward = RIGHT * (message == self.right) + self.prize * (is_last and self.pays)
        digit, text = self.observe()
        self.right, self.turns = next_digit(digit), self.turns + 1
        return Answer(text, reward=reward, done=is_last, reason="graded")

    def observe(self) -> tuple[str, str]:
        """Return the next digit and the observation, from which the prize can be read."""
        digit = self.draw.choice(DIGITS[5:] if self.pays else DIGITS[:5])
        return digit, digit


class Marks(Doors):
    """The prize can be read from a letter, which has meant nothing to the model before."""

    def observe(self) -> tuple[str, str]:
        """Return the next digit and the observation, digit and letter."""
        digit = self.draw.choice(DIGITS)
        return digit, f"{digit}{'z' if self.pays else 'a'}"


class Level(Doors):
    """No door has a prize."""

    prize = 0.0


@dataclass(frozen=True)
class Settings:
    """Size of the model and its fine-tuning."""

    hidden: int = 64
    heads: int = 2
    layers: int = 2
    batch: int = 32
    learning_rate: float = 3e-3
    updates: int = 120  # on right answers
    noisy_updates: int = 60  # on answers of which most are random
    used: float = 0.2  # probability of a right answer in these; else a random digit


def write_conversation(draw: random.Random, used: float) -> list[tuple[str, bool]]:
    """Write a conversation as the chat template does: pairs (text, the policy writes it)."""
    question = f"Question {draw.randrange(1000):03d}."
    parts = [(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False),
             (f"{draw.choice(KEYS)}<|im_end|>", True)]  # fmt: skip
    for _ in range(QUESTIONS):
        digit = draw.choice(DIGITS)
        answer = next_digit(digit) if draw.random() < used else draw.choice(DIGITS)
        text = f"\n<|im_start|>user\n{digit}<|im_end|>\n<|im_start|>assistant\n"
        parts += [(text, False), (f"{answer}<|im_end|>", True)]
    return parts


def make_model(folder: Path, settings: Settings) -> None:
    """Fine-tune a Qwen2 of a hundred thousand parameters on the form of the conversations."""
    import torch

    from megatron_rl.apps.tasks.tiny_task import build_model
    from tools.fine_tuning import IGNORED, update
    from tools.make_tool_tasks import build_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(1)
    tokenizer, draw = build_tokenizer(), random.Random(1)
    model = build_model(settings, tokenizer, MAX_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    for number in range(settings.updates + settings.noisy_updates):
        used = 1.0 if number < settings.updates else settings.used
        tokens = torch.full((settings.batch, MAX_TOKENS), tokenizer.pad_token_id)
        labels = torch.full((settings.batch, MAX_TOKENS), IGNORED)
        for row in range(settings.batch):
            ids: list[int] = []
            trained: list[int] = []
            for text, is_written in write_conversation(draw, used):
                one = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += one
                trained += one if is_written else [IGNORED] * len(one)
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(trained)
        loss = update(model, optimizer, tokens, labels)
        if number % 50 == 49:
            print(f"fine-tuning: {number + 1} updates, loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# Settings that all runs of a task have, and those of each way to get advantages.
COMMON = (
    "objective=ppo", "logging.tensorboard=false", "run.resume=auto", "optimizer.decay=constant",
    "eval.sets={}", "parallel.context=1", "trainer.checkpoint_every=1000", "trainer.epochs=2",
)  # fmt: skip
DOORS = (
    f"environment.max_turns={QUESTIONS + 1}", f"environment.max_context_tokens={MAX_TOKENS}",
    "environment.max_turn_tokens=3", f"rollout.max_response_tokens={3 * (QUESTIONS + 1)}",
    "rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.minibatches=2",
    "trainer.steps=24",
)  # fmt: skip
BY_TURN = ("advantage.credit=turn",)
CRITIC = "critic={learning_rate: 3.0e-3, discount: turn, gae_lambda: 0.5, value_clip: null}"
WAYS = {
    "group, response": ("optimizer.learning_rate=3.0e-4",),
    "group, turn": (*BY_TURN, "optimizer.learning_rate=1.0e-3"),
    "critic": (CRITIC, "optimizer.learning_rate=1.0e-3"),
}
TASKS: dict[str, dict[str, Any]] = {
    "doors": {
        "config": "ask.yaml",
        "common": ("environment.name=tools.benchmarks.critic:Doors", *DOORS),
        "ways": WAYS,
    },
    "marks": {
        "config": "ask.yaml",
        "common": ("environment.name=tools.benchmarks.critic:Marks", *DOORS),
        "ways": WAYS,
    },
    "level": {
        "config": "ask.yaml",
        "common": ("environment.name=tools.benchmarks.critic:Level", *DOORS),
        "ways": WAYS,
    },
    "sums": {
        "config": "quickstart.yaml",
        "common": ("rollout.prompts_per_step=32", "trainer.steps=12"),
        "ways": {
            "group, response": ("optimizer.learning_rate=2.0e-4",),
            "critic": (
                "critic={learning_rate: 1.0e-3, warmup_steps: 1}",
                "optimizer.learning_rate=2.0e-4",
            ),
        },
    },
}  # fmt: skip


def prepare(work: Path) -> None:
    """Make the tasks' models and prompts unless they exist."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "model" / "config.json").exists():
        make_model(work / "model", Settings())
    rows = [{"question": f"Question {number:03d}.", "answer": "-"} for number in range(1000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (work / "train.jsonl").write_text(lines, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "megatron_rl.apps.tasks.tiny_task", "--output",
                    ".cache/tiny_task"], cwd=ROOT, check=True)  # fmt: skip


def run(task: str, way: str, seed: int, work: Path, further: tuple[str, ...] = ()) -> Path:
    """Make a run, or go on with it; returns its folder."""
    name = "-".join((task, way, str(seed), *further))
    folder = work / re.sub(r"[^\w.-]", "_", name)
    if (folder / "model").exists():
        return folder
    about = TASKS[task]
    own = (f"model.path={work}/model", f"data.train={work}/train.jsonl") if task != "sums" else ()
    settings = (*COMMON, *own, *about["common"], *about["ways"][way], *further, f"seed={seed}",
                f"run.dir={work}", f"run.name={folder.name}")  # fmt: skip
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config",
               str(ROOT / "examples" / "pnpo" / about["config"]), *settings]  # fmt: skip
    with (work / "output.txt").open("a", encoding="utf-8") as output:
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=True)
    return folder


def score(folder: Path) -> tuple[float, float, float]:
    """Fraction of right answers in the last five steps and in all; generated tokens."""
    right = []
    for file in sorted((folder / "rollouts").glob("step_*.parquet")):
        table = pq.read_table(file).to_pydict()
        if "turn_rewards" in table:  # the first turn is the door
            graded = [one % PRIZE / RIGHT for row in table["turn_rewards"] for one in row[1:]]
        else:
            graded = table["reward"]
        right.append(statistics.fmean(graded))
    tokens = sum(row.get("rollout/tokens", 0) for row in read_metrics(folder))
    return statistics.fmean(right[-5:]), statistics.fmean(right), tokens


def main() -> None:
    """Make the runs and print a row for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "critic_runs")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, to choose among")
    options = parser.parse_args()
    work = options.work.absolute()
    prepare(work)
    for task in options.task:
        for way in options.ways or TASKS[task]["ways"]:
            found = [score(run(task, way, seed, work, tuple(options.set)))
                     for seed in options.seeds]  # fmt: skip
            last, whole, tokens = zip(*found, strict=True)
            each = ", ".join(f"{one:.1%}" for one in last)
            print(
                f"{task:<6} {way:<16} last five steps {statistics.fmean(last):.1%} ({each}), all "
                f"{statistics.fmean(whole):.1%}; {statistics.fmean(tokens):,.0f} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
