"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym) with rewards of 0 or 1.

`examples/pnpo/make_reasoning_gym.py` writes prompts; this module grades. The reward is 1 if the
task's own checker gives its full score, otherwise 0, because partial scores differ in meaning.
The checker runs in a verifier process, under its time limit. Tasks whose checker evaluates the
answer as code are rejected: a model's output is never executed.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.rewards.thinking import CUT_THINKING, after_thinking
from megatron_rl.rewards.verifier import NO_ANSWER

ASK = "\n\nThink step by step, then give the final answer as <answer>...</answer>."
EVALUATING = {"eval", "exec", "compile", "sympify", "parse_expr", "S", "parse_latex", "__import__"}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def open_task(name: str, *, seed: int, size: int, settings: str = "{}") -> Any:
    """Create the data set of a task; settings: its config as JSON.

    Raises an error if the task does not exist, a setting is invalid, or its checker evaluates text.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"reasoning-gym cannot be imported ({error}); pip install it") from error
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no task {name!r}; it has {', '.join(sorted(DATASETS))}")
    if calls := evaluating_calls(DATASETS[name][0]):
        raise UserError(
            f"reasoning-gym's {name} grades by {', '.join(calls)}, which would run what a model "
            "writes; choose another task"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"reasoning-gym's {name} with {settings}: {error}") from error


def evaluating_calls(dataset: type) -> list[str]:
    """Find calls that evaluate text in the checker of a task and in functions of its package."""
    package = dataset.__module__.partition(".")[0]
    waiting = [getattr(dataset, "score_answer", None)]
    seen: set[Any] = set()
    found: set[str] = set()
    while waiting:
        function = waiting.pop()
        if function in seen or not inspect.isfunction(function):
            continue
        seen.add(function)
        if function.__module__.partition(".")[0] == package:
            calls = set(_calls(ast.parse(textwrap.dedent(inspect.getsource(function)))))
            found |= calls & EVALUATING
            # A method of the task, or a function in the checker's module.
            waiting += [getattr(dataset, name, None) for name in calls]
            waiting += [function.__globals__.get(name) for name in calls]
    return sorted(found)


def _calls(source: ast.AST) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute) and node.func.attr != "compile":  # of re
                yield node.func.attr


def verify(
    text: str, ground_truth: str, data_source: str, row: dict[str, Any]
) -> tuple[float, str, str | None]:
    """Return reward 1 if the task's checker gives the last `<answer>` its full score.

    Only what follows the end of thinking counts.
    """
    final = after_thinking(text)
    answers = _ANSWER.findall(final or "")
    task = row["task"]
    dataset = _opened(task["name"], task["seed"], task["size"], task["settings"])
    entry = _entry(dataset, task["index"])
    if str(entry["answer"]) != ground_truth:  # None if several answers are right
        raise UserError(
            f"{data_source}, entry {task['index']}: this version of reasoning-gym makes another "
            "problem of the same seed; make the file again"
        )
    if text == ground_truth:  # the trial before a run, without tags
        answers = [text]
    if not answers:
        return 0.0, CUT_THINKING if final is None else NO_ANSWER, None
    answer = answers[-1].strip()
    score = float(dataset.score_answer(answer, entry))
    return float(score >= 1.0), f"scored {score:g}", answer


@lru_cache(maxsize=64)
def _opened(name: str, seed: int, size: int, settings: str) -> Any:
    return open_task(name, seed=seed, size=size, settings=settings)


@lru_cache(maxsize=10_000)
def _entry(dataset: Any, index: int) -> dict[str, Any]:
    return dataset[index]
