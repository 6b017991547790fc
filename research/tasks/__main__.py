"""Generate a task with worked solutions, and fine-tune a small model to a target accuracy on it.

    python -m research.tasks running_sum --size 16

Existing files are reused.
"""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from megatron_rl.errors import UserError
from research.tasks.settings import KINDS, TaskSettings

HELP = {
    "size": "Size of a problem.",
    "noise": "Position of the errors in the solutions the model learns from.",
    "corrected": "Fraction of errors that are corrected in the solutions the model learns from.",
    "success": "Target accuracy of the model, sampling at temperature 1.",
    "tolerance": "Largest allowed difference from the target accuracy.",
    "seed": "Random seed of the problems and of the fine-tuning.",
    "train": "Number of training prompts.",
    "heldout": "Number of held-out prompts; none is in the training set.",
    "hidden": "Hidden size of the model; a multiple of 32 times the number of heads.",
    "layers": "Number of layers of the model.",
    "heads": "Number of attention heads of the model.",
    "batch": "Solutions per update of the fine-tuning; fewer if they are long.",
    "learning_rate": "Learning rate of the fine-tuning.",
    "longest_warm_up": "Maximum number of updates per stage of the fine-tuning in one call.",
    "experts": "Experts in each layer of a Qwen3-MoE; 0 makes a dense Qwen2.",
    "experts_per_token": "Experts that a token is sent to; together as wide as a dense MLP.",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the command line, with one option per field of TaskSettings."""
    by_kind = {
        "size": ", ".join(f"{name} {kind.usual} {kind.size}" for name, kind in KINDS.items()),
        "layers": ", ".join(f"{name} {kind.layers}" for name, kind in KINDS.items()),
    }
    parser = argparse.ArgumentParser(prog="python -m research.tasks", description=__doc__)
    parser.add_argument("task", help="Kind of problem.", choices=list(KINDS))
    parser.add_argument(
        "--output", help="Folder to write. Default: .cache/tasks/TASK-SIZE.", type=Path
    )
    for field in fields(TaskSettings)[1:]:
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            help=f"{HELP[field.name]} Default: {by_kind.get(field.name, field.default)}.",
            type=type(field.default),
            default=field.default,
            choices=get_args(field.type) if get_origin(field.type) is Literal else None,
        )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Generate the task if it does not exist, and print where it is."""
    options = build_parser().parse_args(arguments)
    from research.tasks.making import make_once
    from tools.fine_tuning import PORTABLE

    assert "torch" not in sys.modules, "torch is imported already: kernels cannot be chosen"
    os.environ.update(PORTABLE)
    names = [field.name for field in fields(TaskSettings)]
    try:
        settings = TaskSettings(**{name: getattr(options, name) for name in names})
        output = options.output or Path(".cache/tasks") / f"{settings.task}-{settings.size}"
        made = make_once(output, settings, report=lambda text: print(text, flush=True))
    except UserError as error:
        print(f"research.tasks: error: {error}", file=sys.stderr)
        return 1
    print(
        f"{output}: {settings.train} + {settings.heldout} prompts of {made['prompt_tokens']} "
        f"tokens, solutions of {made['trace_tokens']}, a model with {made['parameters']:,} "
        f"parameters and accuracy {made['success']:.1%} ({made['seconds']:.0f} s)"
    )
    if thirds := made.get("slips_by_third"):  # missing from tasks of an earlier version
        print("errors by third of a solution: " + ", ".join(f"{third:.0%}" for third in thirds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
