"""`megatron-rl task`: make a small generated task and a model that solves a wished share of it."""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options: one per field of TaskSettings."""
    from megatron_rl.tasks.settings import KINDS, TaskSettings

    task = commands.add_parser(
        "task",
        help="make a small task and a warmed-up model, for tries and studies",
        description="Make a generated task whose answers are traces, and a small model warmed up "
        "until it solves a wished share of it. What is there already is not made again.",
    )
    by_kind = {
        "size": ", ".join(f"{name} {kind.usual} {kind.size}" for name, kind in KINDS.items()),
        "layers": ", ".join(f"{name} {kind.layers}" for name, kind in KINDS.items()),
    }
    task.add_argument("task", choices=list(KINDS))
    task.add_argument("--output", type=Path, help="default: .cache/tasks/TASK-SIZE")
    for field in fields(TaskSettings)[1:]:
        task.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            choices=get_args(field.type) if get_origin(field.type) is Literal else None,
            help=f"default: {by_kind.get(field.name, field.default)}",
        )
    task.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Make the task, or say where it is."""
    from megatron_rl.tasks.making import PORTABLE, make_once
    from megatron_rl.tasks.settings import TaskSettings

    assert "torch" not in sys.modules, "too late to choose kernels"
    os.environ.update(PORTABLE)
    names = [field.name for field in fields(TaskSettings)]
    settings = TaskSettings(**{name: getattr(options, name) for name in names})
    output = options.output or Path(".cache/tasks") / f"{settings.task}-{settings.size}"
    made = make_once(output, settings, report=lambda text: print(text, flush=True))
    print(
        f"{output}: {settings.train} + {settings.heldout} prompts of {made['prompt_tokens']} "
        f"tokens, traces of {made['trace_tokens']}, a model of {made['parameters']:,} parameters "
        f"right in {made['success']:.1%} ({made['seconds']:.0f} s)"
    )
    if thirds := made.get("slips_by_third"):  # not of what an earlier version made
        print("slips by thirds of a trace: " + ", ".join(f"{third:.0%}" for third in thirds))
    return 0
