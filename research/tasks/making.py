"""Creation of a task: files with problems, and a model fine-tuned to a target accuracy.

The folder contains `train.parquet` and `heldout.parquet` in the schema of DAPO-Math-17k (the ground
truth is the whole worked solution), `model/` in Hugging Face format, and `made.json` with the
settings, the cost of fine-tuning and the accuracy reached. A second call with the same settings
does nothing; an interrupted fine-tuning resumes.
"""

import hashlib
import inspect
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.apps.tasks.tiny_task import build_model
from megatron_rl.errors import UserError
from megatron_rl.runs.files import LOCK, try_lock
from research.tasks.settings import KINDS, TaskSettings
from research.tasks.tokens import build_tokenizer
from research.tasks.worked_solution import Problem, correct_answer, correct_solution
from tools.fine_tuning import update

STAMP = "made.json"
STATE = "fine_tuning.pt"  # of an unfinished fine-tuning
TRIES = 100  # draws per distinct problem


def make_once(
    output: Path, settings: TaskSettings, report: Callable[[str], None]
) -> dict[str, Any]:
    """Create the task in `output` unless it exists; return the content of made.json.

    Until the task is complete it is in a hidden folder, from which the next call resumes. A task
    that an earlier version created with the same settings is used unchanged. Raises UserError if
    `output` contains other files or a task with other settings, or if another process is creating
    it.
    """
    digest = compute_digest(settings)
    stamp = output / STAMP
    if stamp.is_file():
        made: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8"))
        _check_same(output, made["settings"], settings)
        if made["digest"] != digest:
            report(
                f"{output} was made by another version, whose problems and fine-tuning may differ; "
                "it is used unchanged. To create it again, remove it"
            )
        return made
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty and contains no task; choose another folder")
    unfinished = output.parent / f".{output.name}-{digest[:12]}"
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / LOCK).open("a", encoding="utf-8") as lock:
        if not try_lock(lock):
            raise UserError(
                f"{output} is being made by another `python -m research.tasks`; wait for it"
            )
        made = {"digest": digest, "settings": asdict(settings)} | _make(
            unfinished, settings, report
        )
        (unfinished / STAMP).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        for name in (STATE, LOCK):
            (unfinished / name).unlink(missing_ok=True)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    return made


def _check_same(output: Path, present: dict[str, Any], settings: TaskSettings) -> None:
    # A setting that an earlier version did not have had its default there.
    present = {field.name: field.default for field in fields(settings)} | present
    differences = [
        f"{name}={present[name]}, not {value}"
        for name, value in _relevant(settings).items()
        if present[name] != value
    ]
    if differences:
        raise UserError(
            f"{output} contains a task with other settings ({', '.join(differences)}); remove it, "
            "or choose another folder"
        )


def _relevant(settings: TaskSettings) -> dict[str, Any]:
    """Return the settings that affect the result: all except the limit on updates."""
    return {name: value for name, value in asdict(settings).items() if name != "longest_warm_up"}


def compute_digest(settings: TaskSettings) -> str:
    """Hash the settings and the code that determine the task."""
    names = ("making", "measuring", "settings", "tokens", "worked_solution", "fine_tuning")
    code = [Path(__file__).with_name(f"{name}.py") for name in names]
    code.append(Path(inspect.getfile(KINDS[settings.task].draw)))
    code += [Path(inspect.getfile(function)) for function in (build_model, update)]
    parts = [json.dumps(_relevant(settings), sort_keys=True).encode()]
    return hashlib.sha256(b"".join(parts + [file.read_bytes() for file in code])).hexdigest()


def draw_distinct(settings: TaskSettings) -> list[Problem]:
    """Draw the problems of both sets, with distinct questions."""
    generator = random.Random(f"{settings.seed} problems")
    count = settings.train + settings.heldout
    problems: dict[str, Problem] = {}
    for _ in range(TRIES * count):
        problem = settings.kind.draw(generator, settings.size)
        problems.setdefault(problem.question, problem)
        if len(problems) == count:
            return list(problems.values())
    raise UserError(
        f"there are fewer than {settings.train} + {settings.heldout} distinct problems of size "
        f"{settings.size}; reduce train or heldout, or increase size"
    )


def _make(folder: Path, settings: TaskSettings, report: Callable[[str], None]) -> dict[str, Any]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from research.tasks.fine_tuning import FineTuning, build_mixture

    disable_progress_bar()  # for saving one small file
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    problems = draw_distinct(settings)
    heldout, train = problems[: settings.heldout], problems[settings.heldout :]
    _write_parquet(folder / "heldout.parquet", heldout, settings)
    _write_parquet(folder / "train.parquet", train, settings)
    prompt = 1 + max(len(problem.question) for problem in problems)
    solution = 1 + max(len(correct_solution(problem)) for problem in problems)
    tokenizer = build_tokenizer(prompt + 2 * solution)
    build = build_mixture if settings.experts else build_model
    model = build(settings, tokenizer, prompt + 2 * solution)
    seconds = 0.0  # in earlier calls

    def spent() -> float:
        return round(seconds + time.monotonic() - start, 1)

    def save(state: dict[str, Any]) -> None:
        partial = folder / f"{STATE}.partial"
        torch.save({"seconds": spent(), **state}, partial)
        partial.replace(folder / STATE)

    fine_tuning = FineTuning(model, tokenizer, settings, heldout, report=report, save=save)
    if (folder / STATE).is_file():
        state = torch.load(folder / STATE)
        seconds = state.pop("seconds")
        fine_tuning.load(state)
        report(f"resuming after {fine_tuning.progress.updates} updates ({folder})")
    measured = fine_tuning.run()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "prompt_tokens": prompt,
        "trace_tokens": solution,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **measured,
        "seconds": spent(),
    }


def _write_parquet(path: Path, problems: list[Problem], settings: TaskSettings) -> None:
    rows = [
        {
            "data_source": settings.task,
            "prompt": [{"content": problem.question, "role": "user"}],
            "ability": "TRACE",
            "reward_model": {"ground_truth": correct_answer(problem), "style": "rule"},
            "extra_info": {"index": str(index)},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
