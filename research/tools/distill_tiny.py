"""Generated tokens until a student of half the layers has its teacher's score, with and without it.

    python -m research.tools.distill_tiny teacher           # about a minute
    python -m research.tools.distill_tiny run [--seeds 3]   # two runs a seed
    python -m research.tools.distill_tiny table

The student is the tiny task's stored model of two layers, right in about a third of its answers.
The teacher has four: the student with two more layers, whose outputs begin at zero, fine-tuned on
worked solutions with few wrong steps. "rl" is GSPO from the verifier's rewards; "distillation" is
the teacher's reverse KL over the whole vocabulary alone, once per rollout batch as all else.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "distill_tiny"
UPDATES = 150  # of the teacher
NOISE = 0.01  # probability of a wrong step in what it learns: it is not always right
ARMS: dict[str, tuple[str, ...]] = {
    "rl": ("objective={name: gspo}",),
    "distillation": (
        "objective={name: gspo, advantage_coefficient: 0, "
        "kl: {coefficient: 1, estimator: reverse_kl}}",
        f"model.reference={FOLDER / 'teacher'}",
    ),
}
SETTINGS = (
    "parallel.context=1", "rollout.prompts_per_step=32", "rollout.responses_per_prompt=4",
    "trainer.minibatches=4", "trainer.epochs=1", "trainer.checkpoint_every=100",
    "optimizer.learning_rate=1e-3", "optimizer.decay=constant", "eval.every=1", "eval.samples=4",
    "logging.traced_responses=0",
)  # fmt: skip


def make_teacher() -> None:
    """Write the task, the student and the teacher."""
    import random

    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from megatron_rl.apps.tasks.fine_tuning import model_sizes, update
    from megatron_rl.apps.tasks.tiny_task import Settings, draw_batch, make_once, measure_accuracy

    settings = Settings()
    made = make_once(FOLDER / "task", settings)
    student = Qwen2ForCausalLM.from_pretrained(FOLDER / "task" / "model")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "task" / "model")
    torch.manual_seed(settings.seed)
    sizes = model_sizes(settings, tokenizer, student.config.max_position_embeddings)
    teacher = Qwen2ForCausalLM(Qwen2Config(**sizes | {"num_hidden_layers": 2 * settings.layers}))
    teacher.load_state_dict(student.state_dict(), strict=False)
    for layer in teacher.model.layers[settings.layers :]:  # adds nothing until it is trained
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3, betas=(0.9, 0.98))
    generator = random.Random("teacher")
    for number in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - 0.9 * number / UPDATES)
        update(teacher, optimizer, *draw_batch(generator, settings, tokenizer, NOISE))
    from megatron_rl.apps.tasks.tiny_task import draw_distinct

    heldout = draw_distinct(
        random.Random(f"{settings.seed} problems"), settings, settings.heldout + settings.train
    )[: settings.heldout]
    score = measure_accuracy(teacher.eval(), tokenizer, heldout, settings)
    teacher.save_pretrained(FOLDER / "teacher")
    tokenizer.save_pretrained(FOLDER / "teacher")
    scores = {"teacher": score, "student": made["accuracy"], "updates": UPDATES}
    (FOLDER / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    print(scores)


def run(seed: int, arm: str, steps: int) -> None:
    """Train one arm unless it is done."""
    name = f"{arm}_{seed}"
    if (FOLDER / "runs" / name / "model").is_dir():
        return
    task = FOLDER / "task"
    subprocess.run(
        [
            sys.executable, "-m", "megatron_rl.cli", "train",
            "--config", str(ROOT / "examples/pnpo/quickstart.yaml"),
            f"run.dir={FOLDER / 'runs'}", f"run.name={name}", "run.resume=auto", f"seed={seed}",
            f"model.path={task / 'model'}", f"data.train={task / 'train.parquet'}",
            f"eval.sets={{heldout: {task / 'heldout.parquet'}}}", f"trainer.steps={steps}",
            *SETTINGS, *ARMS[arm],
        ],
        check=True, cwd=ROOT,
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
    scores: dict[str, Any] = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))
    print(scores)
    print("| seed | arm | tokens to the teacher's score | steps | tokens in all | last score |")
    print("|---|---|---|---|---|---|")
    for folder in sorted((FOLDER / "runs").iterdir(), key=lambda f: (f.name[-1], f.name)):
        arm, _, seed = folder.name.rpartition("_")
        points = curve(folder)
        reached = [n for n, (_, score) in enumerate(points) if score >= scores["teacher"]]
        first = f"{points[reached[0]][0]:,} | {reached[0]}" if reached else "not reached |"
        print(f"| {seed} | {arm} | {first} | {points[-1][0]:,} | {points[-1][1]:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("teacher", "run", "table"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
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
