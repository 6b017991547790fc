"""Generated tokens until a student of half the layers has its teacher's score, with and without it.

    python -m research.tools.distill_tiny teacher           # about a minute
    python -m research.tools.distill_tiny run [--seeds 3]   # two runs a seed
    python -m research.tools.distill_tiny table

The student is the tiny task's stored model of two layers, right in about a third of its answers.
The teacher has four: the student with two more layers, whose outputs begin at zero, after a
supervised start on worked solutions with few wrong steps. "rl" is GSPO from the verifier's rewards,
"distillation" the teacher's reverse KL over the whole vocabulary alone. Both have the same learning
rate, and use each rollout batch once, in four updates.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "distill_tiny"
TASK = FOLDER / "task"
UPDATES = 150  # of the teacher
NOISE = 0.01  # probability of a wrong step in what it learns: it is not always right
GSPO = "constraint: {low: 0.066, high: 0.089}"  # which the first run recommended
ARMS: dict[str, tuple[str, ...]] = {
    "rl": (f"objective={{name: gspo, {GSPO}}}",),
    "distillation": (
        "objective={name: gspo, advantage_coefficient: 0, "
        "kl: {coefficient: 1, estimator: reverse_kl}}",
        f"model.reference={FOLDER / 'teacher' / 'model'}",
    ),
}
SETTINGS = (
    "rollout.prompts_per_step=32", "rollout.responses_per_prompt=4",
    "trainer.minibatches=4", "trainer.epochs=1", "trainer.checkpoint_every=100",
    "optimizer.learning_rate=3e-4", "optimizer.decay=constant", "eval.every=1",
    "logging.traced_responses=0",
)  # fmt: skip


def make_teacher() -> None:
    """Write the task, the student and the teacher, by a supervised start from the student."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from megatron_rl.apps.tasks.tiny_task import Settings, make_once, model_sizes

    settings = Settings()
    make_once(TASK, settings)
    make_once(FOLDER / "solutions", Settings(noise=NOISE), supervised=True)
    student = Qwen2ForCausalLM.from_pretrained(TASK / "model")
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    torch.manual_seed(settings.seed)
    sizes = model_sizes(settings, tokenizer, student.config.max_position_embeddings)
    teacher = Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 2 * settings.layers}))
    teacher.load_state_dict(student.state_dict(), strict=False)
    for layer in teacher.model.layers[settings.layers :]:  # adds nothing until it is trained
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    teacher.save_pretrained(FOLDER / "deeper")
    tokenizer.save_pretrained(FOLDER / "deeper")
    train(
        "sft", FOLDER / "deeper", "teacher", f"data.train={FOLDER / 'solutions/solutions.jsonl'}",
        f"sft.validation={{solutions: {FOLDER / 'solutions/solutions_heldout.jsonl'}}}",
        f"trainer.steps={UPDATES}", f"eval.every={UPDATES}", "optimizer.learning_rate=1e-3",
        "trainer.checkpoint_every=1000",
    )  # fmt: skip


def train(config: str, model: Path, name: str, *settings: str) -> None:
    """Train by an example's config unless it is done."""
    if (FOLDER / name / "model").is_dir():
        return
    subprocess.run(
        [
            sys.executable, "-m", "megatron_rl.cli", "train",
            "--config", str(ROOT / f"examples/pnpo/{config}.yaml"), f"run.dir={FOLDER}",
            f"run.name={name}", "run.resume=auto", f"model.path={model}", "parallel.context=1",
            f"eval.sets={{heldout: {TASK / 'heldout.parquet'}}}", "eval.samples=4", *settings,
        ],
        check=True, cwd=ROOT,
    )  # fmt: skip


def run(seed: int, arm: str, steps: int) -> None:
    """Train one arm unless it is done."""
    train(
        "quickstart", TASK / "model", f"{arm}_{seed}", f"seed={seed}", f"trainer.steps={steps}",
        f"data.train={TASK / 'train.parquet'}", *SETTINGS, *ARMS[arm],
    )  # fmt: skip


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return (generated tokens so far, held-out score) after each step of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points, tokens = [], 0
    for row in rows:
        tokens += row.get("rollout/tokens", 0)
        if "eval/heldout/avg@4" in row:
            points.append((tokens, row["eval/heldout/avg@4"]))
    return points


def table() -> None:
    """Print tokens and steps until the teacher's score, and the last score, of each run."""
    goal = curve(FOLDER / "teacher")[-1][1]
    print(f"the teacher's score: {goal:.3f}\n")
    print("| seed | arm | tokens to the teacher's score | steps | tokens in all | last score |")
    print("|---|---|---|---|---|---|")
    for folder in sorted(FOLDER.glob("*_[0-9]"), key=lambda f: (f.name[-1], f.name)):
        arm, _, seed = folder.name.rpartition("_")
        points = curve(folder)
        reached = [n for n, (_, score) in enumerate(points) if score >= goal]
        first = f"{points[reached[0]][0]:,} | {reached[0]}" if reached else "not reached |"
        print(f"| {seed} | {arm} | {first} | {points[-1][0]:,} | {points[-1][1]:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("teacher", "run", "table"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--arm", choices=tuple(ARMS), help="Run this arm alone.")
    arguments = parser.parse_args()
    if arguments.command == "teacher":
        make_teacher()
    elif arguments.command == "table":
        table()
    else:
        for seed in range(1, arguments.seeds + 1):
            for arm in (arguments.arm,) if arguments.arm else ARMS:
                run(seed, arm, arguments.steps)


if __name__ == "__main__":
    main()
