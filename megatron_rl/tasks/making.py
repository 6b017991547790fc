"""Making a task: problems in files, and a model warmed up to a wished success, once.

The folder holds `train.parquet` and `heldout.parquet` in the schema of DAPO-Math-17k (the ground
truth is the whole trace), `model/` in Hugging Face format, and `made.json`: the settings, what the
warm-up took and what it reached. A second call with the same settings finds it and does nothing; a
warm-up that came to an end before goes on.
"""

import hashlib
import inspect
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.runs.lock import LOCK, take_lock
from megatron_rl.tasks.settings import KINDS, TaskSettings
from megatron_rl.tasks.tokens import build_tokenizer
from megatron_rl.tasks.trace import Problem, right_answer, right_trace

STAMP = "made.json"
STATE = "warm_up.pt"  # of one that has not ended
TRIES = 100  # for one more problem that is not there yet
# One way to round for every x86-64 processor with AVX2, so that the same settings make the same
# model; libraries read these when they are loaded.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}


def make_once(
    output: Path, settings: TaskSettings, report: Callable[[str], None]
) -> dict[str, Any]:
    """Make the task in `output` unless it is there; returns the content of made.json.

    The folder appears under its name when it is complete; until then it is a hidden one, from which
    the next call goes on. What an earlier version made with the same
    settings is taken as it is. Raises ValueError if `output` holds something else, or a task of
    other settings, or if another process is making it.
    """
    digest = compute_digest(settings)
    stamp = output / STAMP
    if stamp.is_file():
        made: dict[str, Any] = json.loads(stamp.read_text())
        _check_same(output, made["settings"], settings)
        if made["digest"] != digest:
            report(
                f"{output} was made by another version, which may have had other problems and "
                "another warm-up, and is taken as it is; to make it anew, remove it"
            )
        return made
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and holds no task; name another folder")
    begun = output.parent / f".{output.name}-{digest[:12]}"
    begun.mkdir(parents=True, exist_ok=True)
    with (begun / LOCK).open("a") as lock:
        if not take_lock(lock):
            raise ValueError(f"{output} is being made by another `megatron-rl task`; wait for it")
        made = {"digest": digest, "settings": asdict(settings)} | _make(begun, settings, report)
        (begun / STAMP).write_text(json.dumps(made, indent=2) + "\n")
        for name in (STATE, LOCK):
            (begun / name).unlink(missing_ok=True)
        if output.exists():
            output.rmdir()
        begun.rename(output)
    return made


def _check_same(output: Path, present: dict[str, Any], settings: TaskSettings) -> None:
    wanted = _deciding(settings)
    other = [
        f"{name}={present.get(name)}, not {value}"
        for name, value in wanted.items()
        if present.get(name) != value
    ]
    if other:
        raise ValueError(
            f"{output} holds a task of other settings ({', '.join(other)}); remove it, or name "
            "another folder"
        )


def _deciding(settings: TaskSettings) -> dict[str, Any]:
    """Settings without the bound on the warm-up: whoever reaches it has the same model."""
    return {name: value for name, value in asdict(settings).items() if name != "longest_warm_up"}


def compute_digest(settings: TaskSettings) -> str:
    """What decides the output: the settings, and the code that follows them."""
    names = ("making", "measuring", "settings", "tokens", "trace", "warm_up")
    code = [Path(__file__).with_name(f"{name}.py") for name in names]
    code.append(Path(inspect.getfile(KINDS[settings.task].draw)))
    parts = [json.dumps(_deciding(settings), sort_keys=True).encode()]
    return hashlib.sha256(b"".join(parts + [file.read_bytes() for file in code])).hexdigest()


def draw_different(settings: TaskSettings) -> list[Problem]:
    """All problems of both sets, no two with the same question."""
    generator = random.Random(f"{settings.seed} problems")
    wanted = settings.train + settings.heldout
    problems: dict[str, Problem] = {}
    for _ in range(TRIES * wanted):
        problem = settings.kind.draw(generator, settings.size)
        problems.setdefault(problem.question, problem)
        if len(problems) == wanted:
            return list(problems.values())
    raise ValueError(
        f"there are too few different problems of size {settings.size} for {settings.train} + "
        f"{settings.heldout}; take fewer, or larger ones"
    )


def _make(folder: Path, settings: TaskSettings, report: Callable[[str], None]) -> dict[str, Any]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from megatron_rl.tasks.warm_up import WarmUp, build_model

    disable_progress_bar()  # of saving one small file
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    problems = draw_different(settings)
    heldout, train = problems[: settings.heldout], problems[settings.heldout :]
    _write_parquet(folder / "heldout.parquet", heldout, settings)
    _write_parquet(folder / "train.parquet", train, settings)
    prompt = 1 + max(len(problem.question) for problem in problems)
    trace = 1 + max(len(right_trace(problem)) for problem in problems)
    tokenizer = build_tokenizer(prompt + 2 * trace)
    model = build_model(settings, tokenizer, prompt + 2 * trace)
    seconds = 0.0  # of earlier calls

    def spent() -> float:
        return round(seconds + time.monotonic() - start, 1)

    def keep(state: dict[str, Any]) -> None:
        partial = folder / f"{STATE}.partial"
        torch.save({"seconds": spent(), **state}, partial)
        partial.replace(folder / STATE)

    warm_up = WarmUp(model, tokenizer, settings, heldout, report=report, keep=keep)
    if (folder / STATE).is_file():
        state = torch.load(folder / STATE)
        seconds = state.pop("seconds")
        warm_up.load(state)
        report(f"going on after {warm_up.progress.updates} updates ({folder})")
    measured = warm_up.run()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "prompt_tokens": prompt,
        "trace_tokens": trace,
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
            "reward_model": {"ground_truth": right_answer(problem), "style": "rule"},
            "extra_info": {"index": str(index)},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
