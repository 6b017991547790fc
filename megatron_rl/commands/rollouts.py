"""`megatron-rl rollouts`: show recorded responses with their rewards."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.commands.options import Commands, add_command, count, option
from megatron_rl.errors import UserError


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "rollouts", run,
        option("folder", "Run directory.", metavar="RUN"),
        option("--step", "Step to show. Default: the newest recorded step.", type=int, metavar="N"),
        option("--order", "Show random rollouts, or those with the highest or lowest reward. "
               "Default: %(default)s.", choices=("random", "best", "worst"), default="random"),
        option("--count", "Number of rollouts to show. Default: %(default)s.",
               type=count, default=3, metavar="N"),
        option("--group", "Show all of the step's responses to one prompt side by side; PROMPT is "
               "the prompt's number as printed without this option.", type=int, metavar="PROMPT"),
        option("--characters", "Maximum length of a text in characters; the middle of longer texts "
               "is left out. Default: %(default)s.", type=count, default=1500, metavar="N"),
        option("--json", "Print one JSON object per rollout, with full texts."),
        help="Show the responses of a step, with their rewards.",
        description="Show recorded rollouts of one step of a run: a few, selected by reward or at "
        "random (the same ones every time), or all responses to one prompt side by side.",
        sets_environment=False,
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the chosen rollouts; raises UserError if there are none."""
    from megatron_rl.runs.rollouts import (
        choose_rollouts,
        describe_rollout,
        read_rollouts,
        recorded_steps,
    )

    folder = Path(options.folder)
    steps = recorded_steps(folder)
    step = steps[-1] if options.step is None else options.step
    rows = read_rollouts(folder, step)
    if options.group is None:
        chosen = choose_rollouts(rows, order=options.order, count=options.count, seed=step)
    else:
        chosen = _group(rows, options.group)
    if options.json:
        for row in chosen:
            print(json.dumps({"step": step} | row))
        return 0
    sample = "a sample of " if "place" in rows[0] else ""  # see logging.keep_rollouts
    print(
        f"{folder}, step {step} (of the recorded steps {steps[0]} to {steps[-1]}): {sample}"
        f"{len(rows)} rollouts, mean reward {fmean(row['reward'] for row in rows):.3f}"
    )
    if options.group is not None:
        _print_group(chosen, most=options.characters)
        return 0
    for row in chosen:
        print("\n" + describe_rollout(row, most=options.characters))
    print("\n" + _hint(options, step, chosen[0]["prompt_index"]))
    return 0


def _group(rows: Sequence[dict[str, Any]], prompt: int) -> list[dict[str, Any]]:
    if group := [row for row in rows if row["prompt_index"] == prompt]:
        return group
    known = ", ".join(map(str, list(dict.fromkeys(row["prompt_index"] for row in rows))[:8]))
    raise UserError(
        f"--group {prompt}: this step has no responses to prompt {prompt}; choose one of {known}, "
        "..."
    )


def _print_group(rows: Sequence[dict[str, Any]], *, most: int) -> None:
    """Print the prompt once, then a table with one row per response."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megatron_rl.runs.rollouts import printable, prompt_text, response_text, shorten

    def text(value: object) -> Text:
        return Text(shorten(printable(value), most))

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for name, shown in (("prompt", prompt_text(rows[0])), ("truth ", rows[0]["ground_truth"])):
        console.print(Text(f"\n  {name} | ") + text(shown), end="")
    table = Table(show_lines=True)
    for name in ("", "reward", "advantage", "tokens", "extracted"):
        table.add_column(name, justify="right")
    table.add_column("response", overflow="fold")
    for row in rows:
        table.add_row(
            text(row["sample_index"] + 1),
            text(f"{row['reward']:g}"),
            text(f"{row['advantage']:+.3g}"),
            text(f"{row['tokens']}{' (cut)' if row['finish_reason'] == 'length' else ''}"),
            text("" if row["extracted"] is None else row["extracted"]),
            text(response_text(row)),
        )
    console.print("\n", table)


def _hint(options: argparse.Namespace, step: int, prompt: int) -> str:
    return (
        "more: --step N, --order best or worst, --count N; all responses to one prompt:\n"
        f"  megatron-rl rollouts {options.folder} --step {step} --group {prompt}"
    )
