"""Distillation of tiny students under reuse of rollout batches, by weighting: the planned study.

    python -m research.tools.distill_reuse models  # eight students and their teacher, as stored
    python -m research.tools.distill_reuse run [--minutes 9]  # continues where it ended
    python -m research.tools.distill_reuse table

The plan is `research/docs/distillation-study.md`; a row of results for each run is in
`research/results/distillation.csv`. One process, transformers and `megatron_rl.objectives`.
"""

import argparse
import csv
import math
import random
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.apps.tasks.tiny_task import (
    Problem,
    Settings,
    build_model,
    build_tokenizer,
    draw_distinct,
    draw_problem,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import PolicyObjective, build_objective
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.types import Denominators
from research.study.statistics import holm, paired_interval, student_p

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "distill_reuse"
RESULTS = ROOT / "research" / "results" / "distillation.csv"
MODELS = ROOT / "research" / "results" / "distillation_models.tar.xz"
STUDENTS, TEACHER = range(1, 9), 100  # seeds
EPOCHS = (1, 4, 16)
BATCHES, PROMPTS, RESPONSES, MINIBATCHES, RATE = 8, 32, 4, 4, 3e-4
LONGEST = 56  # tokens of a response
HELDOUT = 128  # prompts
KL = {"coefficient": 1.0}
SAMPLED = KL | {"estimator": "advantage"}
EXACT = KL | {"estimator": "reverse_kl"}
WEIGHTINGS: dict[str, dict[str, Any]] = {
    "one": {"weight": "one", "kl": SAMPLED},
    "token": {"weight": "token", "kl": SAMPLED},
    "prefix_mean": {"weight": "prefix_mean", "kl": SAMPLED},
    "divergence": {"weight": "prefix_mean", "kl": EXACT},
    "divergence, weighted": {"weight": "prefix_mean", "kl": EXACT | {"weighted": True}},
}
PRIMARY = [(n, "prefix_mean", other) for n in (4, 16) for other in ("one", "token")]
REPEATED = (1, 4)  # epochs of the cells that run twice, to know how much a run varies by itself
COLUMNS = ("student", "epochs", "weighting", "repeat", "kl", "right", "spread", "finite", "seconds")


def objective_of(weighting: str) -> PolicyObjective:
    """Return PNPO without its gate and without rewards, with this weight and KL term."""
    return build_objective(
        "pnpo", constraint={"kind": "none"}, advantage_coefficient=0.0, **WEIGHTINGS[weighting]
    )


class Task:
    """Prompts and answers as tokens, padded on the left and on the right."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.tokenizer = build_tokenizer(8 * self.settings.longest + 48)
        problems = draw_distinct(random.Random("distillation study"), self.settings, 4096 + HELDOUT)
        self.heldout, self.train = problems[:HELDOUT], problems[HELDOUT:]
        self.end, self.padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def prompts(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """Return ids and their mask, [B, P] each."""
        texts = [
            f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
            for problem in problems
        ]
        encoded = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        return encoded["input_ids"], encoded["attention_mask"]

    def score(self, problems: Sequence[Problem], responses: Tensor) -> float:
        """Return the share of right answers."""
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=False)
        pairs = zip(problems, texts, strict=True)
        return sum(f"\\boxed{{{problem.answer}}}<" in text for problem, text in pairs) / len(texts)


def log_probs(model: Any, ids: Tensor, mask: Tensor, first: int) -> Tensor:
    """Compute next-token log-probs of the responses, which begin at column `first`; [B, R, V]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, first - 1 : -1].float().log_softmax(-1)


def fine_tune(task: Task, seed: int, *, layers: int, updates: int, noise: float) -> Any:
    """Train a random model on worked solutions, with a rate that falls to 0."""
    torch.manual_seed(seed)
    generator = random.Random(f"{seed} solutions")
    sizes = Settings(layers=layers)
    model = build_model(sizes, task.tokenizer, 8 * sizes.longest + 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.98), weight_decay=0.01)
    for update in range(updates):
        problems = [draw_problem(generator, task.settings) for _ in range(64)]
        ids, mask = task.prompts(problems)
        answers = [one.solution(generator, noise) + "<|im_end|>" for one in problems]
        encoded = task.tokenizer(answers, return_tensors="pt", padding=True, padding_side="right")
        given = encoded["attention_mask"]
        logs = log_probs(
            model, torch.cat((ids, encoded["input_ids"]), 1), torch.cat((mask, given), 1),
            ids.shape[1],
        )  # fmt: skip
        own = logs.gather(2, encoded["input_ids"][..., None]).squeeze(2)
        loss = -(own * given).sum() / given.sum()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((update + 1) / 50, (updates - update) / updates)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def make_models(task: Task) -> None:
    """Write the teacher and the students, and print their shares of right answers.

    They are the stored ones; without that file they are trained from their seeds.
    """
    if MODELS.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(MODELS) as archive:
            archive.extractall(FOLDER, filter="data")
    for seed in (TEACHER, *STUDENTS):
        if (folder := FOLDER / str(seed)).is_dir():
            continue
        start = time.monotonic()
        is_teacher = seed == TEACHER
        model = fine_tune(
            task, seed, layers=4 if is_teacher else 2, updates=1000 if is_teacher else 500,
            noise=0.01 if is_teacher else 0.12,
        )  # fmt: skip
        torch.manual_seed(seed)
        problems, ids, _, first = sample(task, model, task.heldout)
        right = task.score(problems, ids[:, first:])
        model.save_pretrained(folder)
        print(f"{seed}: {right:.1%} right, {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def sample(
    task: Task, model: Any, problems: Sequence[Problem]
) -> tuple[list[Problem], Tensor, Tensor, int]:
    """Sample responses; return the problem of each, ids and mask [B, P + R], and P."""
    repeated = [problem for problem in problems for _ in range(RESPONSES)]
    ids, mask = task.prompts(repeated)
    first = ids.shape[1]
    whole = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=LONGEST, eos_token_id=task.end, pad_token_id=task.padding,
    )  # fmt: skip
    ended = (whole[:, first:] == task.end).cumsum(1)
    valid = (ended == 0) | ((ended == 1) & (whole[:, first:] == task.end))
    return repeated, whole, torch.cat((mask, valid.long()), 1), first


def evaluate(task: Task, model: Any, teacher: Any) -> tuple[float, float]:
    """Return the KL to the teacher per token, and the share of right answers, held out."""
    problems, ids, mask, first = sample(task, model, task.heldout)
    with torch.no_grad():
        log_p, log_q = (log_probs(each, ids, mask, first) for each in (model, teacher))
    valid = mask[:, first:].bool()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[valid].mean()
    return float(kl), task.score(problems, ids[:, first:])


def update_loss(
    objective: PolicyObjective,
    log_p: Tensor,
    log_q: Tensor,
    *,
    behavior: Tensor,
    labels: Tensor,
    valid: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a minibatch, and log w_L of its responses; [B, R, V] and [B, R] each."""
    own, theirs = (x.gather(2, labels[..., None]).squeeze(2) for x in (log_p, log_q))
    inputs = TokenInputs(
        policy_logprobs=own.reshape(-1), behavior_logprobs=behavior.reshape(-1),
        advantages=torch.zeros(own.numel()), reference_logprobs=theirs.reshape(-1),
        divergence=(log_p.exp() * (log_p - log_q)).sum(-1).reshape(-1),
    )  # fmt: skip
    result = objective(
        inputs, layout=SequenceLayout([labels.shape[1]] * len(labels), valid.reshape(-1)),
        denominators=Denominators(responses=float(len(labels)), tokens=float(valid.sum())),
    )  # fmt: skip
    moved = ((own.detach() - behavior) * valid).sum(1) / valid.sum(1)
    return result.loss.sum(), moved


def run(
    task: Task, teacher: Any, student: int, epochs: int, weighting: str, repeat: int
) -> dict[str, Any]:
    """Train one student in one cell; return its row. repeat: with other prompts and responses."""
    from transformers import Qwen2ForCausalLM

    start, finite, spread = time.monotonic(), True, 0.0
    model = Qwen2ForCausalLM.from_pretrained(FOLDER / str(student))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    objective = objective_of(weighting)
    order = random.Random(f"{student} prompts" + f" {repeat}" * (repeat > 0))
    for batch in range(BATCHES):
        torch.manual_seed(1000 * student + 100 * repeat + batch)
        _, ids, mask, first = sample(task, model, order.sample(task.train, PROMPTS))
        labels, valid = ids[:, first:], mask[:, first:].bool()
        with torch.no_grad():
            log_q, frozen = (log_probs(each, ids, mask, first) for each in (teacher, model))
        behavior = frozen.gather(2, labels[..., None]).squeeze(2)
        means: list[Tensor] = []
        for epoch in range(epochs):
            for rows in torch.arange(len(ids)).chunk(MINIBATCHES):
                loss, moved = update_loss(
                    objective, log_probs(model, ids[rows], mask[rows], first), log_q[rows],
                    behavior=behavior[rows], labels=labels[rows], valid=valid[rows],
                )  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if not torch.isfinite(norm):
                    finite = False
                    break
                optimizer.step()
                if epoch == epochs - 1:
                    means.append(moved)
            if not finite:
                break
        if not finite:
            break
        spread += float(torch.cat(means).std()) / BATCHES
    torch.manual_seed(student)  # the same for all runs of a student
    kl, right = evaluate(task, model, teacher)
    seconds = round(time.monotonic() - start, 1)
    values = (student, epochs, weighting, repeat, kl, right, spread, int(finite), seconds)
    return dict(zip(COLUMNS, values, strict=True))


def read_rows() -> list[dict[str, str]]:
    """Read the rows of all finished runs."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_all(task: Task, minutes: float) -> None:
    """Run what is missing, student by student and the repeats last, until the time is over."""
    from transformers import Qwen2ForCausalLM

    end = time.monotonic() + 60 * minutes
    teacher = Qwen2ForCausalLM.from_pretrained(FOLDER / str(TEACHER))
    done = {
        (int(row["student"]), int(row["epochs"]), row["weighting"], int(row["repeat"]))
        for row in read_rows()
    }
    cells = [(s, n, w, 0) for s in STUDENTS for n in EPOCHS for w in WEIGHTINGS]
    cells += [(s, n, w, 1) for s in STUDENTS for n in REPEATED for w in WEIGHTINGS]
    for cell in cells:
        if cell in done:
            continue
        if time.monotonic() > end:
            return
        row = run(task, teacher, *cell)
        is_new = not RESULTS.is_file()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        print(row, flush=True)


def differences(
    rows: Sequence[dict[str, str]], epochs: int, one: str, other: str, *, column: str = "kl"
) -> list[float]:
    """Return one - other for each student, of log KL or of another column."""
    table = {
        (row["student"], row["weighting"]): float(row[column])
        for row in rows
        if int(row["epochs"]) == epochs and row["repeat"] == "0"
    }
    students = sorted({student for student, _ in table})
    scale = math.log if column == "kl" else float
    return [scale(table[s, one]) - scale(table[s, other]) for s in students]


def of_whole_students(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of students whose planned runs have all ended."""
    ended = Counter(row["student"] for row in rows if row["repeat"] == "0")
    return [row for row in rows if ended[row["student"]] == len(EPOCHS) * len(WEIGHTINGS)]


def tables(rows: Sequence[dict[str, str]]) -> str:
    """Return means of the cells and the contrasts, as on the page of the study."""
    lines = ["| epochs | weighting | KL to the teacher | right | spread of log w_L |",
             "|---|---|---|---|---|"]  # fmt: skip
    for epochs in EPOCHS:
        for name in WEIGHTINGS:
            own = [
                row
                for row in rows
                if (int(row["epochs"]), row["weighting"], row["repeat"]) == (epochs, name, "0")
            ]
            kl, right, spread = (
                sum(float(row[key]) for row in own) / len(own) for key in ("kl", "right", "spread")
            )
            lines.append(f"| {epochs} | `{name}` | {kl:.4f} | {100 * right:.1f}% | {spread:.4f} |")
    found = [differences(rows, *contrast) for contrast in PRIMARY]
    adjusted = holm([student_p(each) for each in found])
    lines += [
        "",
        "| epochs | contrast of log KL | mean, 95% interval | p (Holm) |",
        "|---|---|---|---|",
    ]
    for (epochs, one, other), each, p in zip(PRIMARY, found, adjusted, strict=True):
        interval = paired_interval(each)
        lines.append(
            f"| {epochs} | `{one}` - `{other}` | {interval.mean:+.3f} ± {interval.half_width:.3f} "
            f"| {p:.3f} |"
        )
    secondary = [(1, "prefix_mean", "one"), (1, "prefix_mean", "token")]
    secondary += [(n, "divergence, weighted", "divergence") for n in EPOCHS]
    secondary += [(n, "divergence", "token") for n in EPOCHS]
    for epochs, one, other in secondary:
        interval = paired_interval(differences(rows, epochs, one, other))
        lines.append(
            f"| {epochs} | `{one}` - `{other}` | {interval.mean:+.3f} ± {interval.half_width:.3f} "
            "| secondary |"
        )
    if any(row["repeat"] == "1" for row in rows):
        lines += ["", "| epochs | weighting | a run's deviation of log KL |", "|---|---|---|"]
        lines += [
            f"| {epochs} | `{name}` | {own_deviation(rows, epochs, name):.3f} |"
            for epochs in REPEATED
            for name in WEIGHTINGS
        ]
    return "\n".join(lines)


def own_deviation(rows: Sequence[dict[str, str]], epochs: int, weighting: str) -> float:
    """Return the standard deviation of log KL between runs of one student in one cell.

    From the differences d of two runs each: the root of the mean of d^2 / 2.
    """
    logs: dict[str, list[float]] = {}
    for row in rows:
        if int(row["epochs"]) == epochs and row["weighting"] == weighting:
            logs.setdefault(row["student"], []).append(math.log(float(row["kl"])))
    squares = [(pair[0] - pair[1]) ** 2 / 2 for pair in logs.values() if len(pair) == 2]
    return math.sqrt(sum(squares) / len(squares))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("models", "run", "table"))
    parser.add_argument("--minutes", type=float, default=9.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "models":
        make_models(Task())
    elif arguments.command == "run":
        run_all(Task(), arguments.minutes)
    else:
        print(tables(of_whole_students(read_rows())))


if __name__ == "__main__":
    main()
