"""A critic next to group baselines at equal generated tokens: where it helps, and where not.

    python -m tools.benchmarks.critic [--task stakes sums] [--seeds 1 2 3 4 5] [--work FOLDER]

`stakes`: a conversation of seven turns. Each answer of the environment names a digit and a stake,
drawn again; the next turn earns the stake if it repeats the digit. What later turns earn is mostly
luck, which the mean over a group of conversations leaves in every turn's advantage, while a critic
reads the stake before it judges a turn.

`sums`: the quickstart's problems, one turn and one reward at its end. Eight responses to a prompt
tell what to expect from it, and a critic has to learn that.

Every run has the same prompts, conversations, objective and optimizer; learning rates and lambdas
were chosen on seed 100. Runs are those of `megatron-rl train`: a second call continues where the
first one ended, and prints the table.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from megatron_rl.environments import Answer
from megatron_rl.runs.files import read_metrics

ROOT = Path(__file__).parents[2]
TURNS, STAKES = 9, {"a": 1.0, "z": 20.0}
RARE = 0.15  # probability of the high stake


class Stakes:
    """Names a digit and a stake in each answer; a turn that repeats the digit earns the stake."""

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.draw, self.answer, self.stake, self.turns = random.Random(seed), "", "a", -1

    async def step(self, message: str) -> Answer:
        """Grade the turn, and name the next digit and stake."""
        self.turns += 1
        reward = STAKES[self.stake] * float(message == self.answer)
        digit = self.draw.randrange(10)
        self.answer = str((digit + 1) % 10)
        self.stake = "z" if self.draw.random() < RARE else "a"
        done = self.turns == TURNS
        return Answer(f"{digit}{self.stake}", reward=reward, done=done, reason="graded")


# Settings that all runs of a task have, and those of each way to get advantages.
COMMON = (
    "objective=ppo", "logging.tensorboard=false", "run.resume=auto", "optimizer.decay=constant",
    "eval.sets={}", "parallel.context=1", "trainer.checkpoint_every=1000",
)  # fmt: skip
BY_TURN = ("advantage.credit=turn",)
TASKS: dict[str, dict[str, Any]] = {
    "stakes": {
        "config": "ask.yaml",
        "common": (
            "environment.name=tools.benchmarks.critic:Stakes", f"environment.max_turns={TURNS + 1}",
            "environment.max_context_tokens=126", "environment.max_turn_tokens=4",
            "rollout.max_response_tokens=40", "rollout.prompts_per_step=8",
            "rollout.responses_per_prompt=4", "trainer.epochs=2", "trainer.minibatches=2",
            "trainer.steps=60",
        ),
        "ways": {
            "group mean of the response": (),
            "group mean of each turn": BY_TURN,
            "critic": ("critic={learning_rate: 3.0e-3, gae_lambda: 0.5, warmup_steps: 1}",),
        },
    },
    "sums": {
        "config": "quickstart.yaml",
        "common": ("rollout.prompts_per_step=32", "trainer.steps=12", "trainer.epochs=2"),
        "ways": {
            "group mean of the response": (),
            "critic": ("critic={learning_rate: 1.0e-3, warmup_steps: 1}",),
        },
    },
}  # fmt: skip


def make_model(work: Path) -> Path:
    """Copy the small model of `tools/make_tool_tasks.py`, for longer conversations than its own."""
    folder, source = work.absolute() / "model", ROOT / ".cache" / "tool_tasks" / "model"
    if not folder.exists():
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 128
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(task: str, way: str, seed: int, work: Path, further: tuple[str, ...] = ()) -> Path:
    """Make a run, or go on with it; returns its folder."""
    name = "-".join((task, way, str(seed), *further))
    folder = work.absolute() / re.sub(r"[^\w.-]", "_", name)
    if (folder / "model").exists():
        return folder
    about = TASKS[task]
    model = (f"model.path={make_model(work)}",) if task == "stakes" else ()
    settings = (*COMMON, *model, *about["common"], *about["ways"][way], *further, f"seed={seed}",
                f"run.dir={folder.parent}", f"run.name={folder.name}")  # fmt: skip
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config",
               str(ROOT / "examples" / "pnpo" / about["config"]), *settings]  # fmt: skip
    work.mkdir(parents=True, exist_ok=True)
    with (work / "output.txt").open("a", encoding="utf-8") as output:
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=True)
    return folder


def score(folder: Path) -> tuple[float, float, float]:
    """Fraction of right turns in the last five steps and in all; generated tokens."""
    right = []
    for file in sorted((folder / "rollouts").glob("step_*.parquet")):
        table = pq.read_table(file).to_pydict()
        rows = table.get("turn_rewards") or [[reward] for reward in table["reward"]]
        graded = [reward for row in rows for reward in row[1:] or row]  # the first turn only asks
        right.append(statistics.fmean(reward > 0 for reward in graded))
    tokens = sum(row.get("rollout/tokens", 0) for row in read_metrics(folder))
    return statistics.fmean(right[-5:]), statistics.fmean(right), tokens


def main() -> None:
    """Make the runs and print a row for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "critic_runs")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, to choose among")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "tools.make_tool_tasks", "--output", ".cache/tool_tasks"],
                   cwd=ROOT, check=True)  # fmt: skip
    subprocess.run([sys.executable, "-m", "megatron_rl.apps.tasks.tiny_task", "--output",
                    ".cache/tiny_task"], cwd=ROOT, check=True)  # fmt: skip
    for task in options.task:
        for way in options.ways or TASKS[task]["ways"]:
            found = [score(run(task, way, seed, options.work, tuple(options.set)))
                     for seed in options.seeds]  # fmt: skip
            last, whole, tokens = zip(*found, strict=True)
            each = ", ".join(f"{one:.1%}" for one in last)
            print(
                f"{task:<7} {way:<27} last five steps {statistics.fmean(last):.1%} ({each}), all "
                f"{statistics.fmean(whole):.1%}; {statistics.fmean(tokens):,.0f} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
