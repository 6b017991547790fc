"""`megatron-rl quickstart`: make a tiny task and model, and train it, on two CPU cores."""

import argparse
import multiprocessing
import sys
from importlib.resources import files

from megatron_rl.apps.tasks import tiny_task
from megatron_rl.commands import train
from megatron_rl.commands.options import Commands, add_command, overrides
from megatron_rl.config import load_config
from megatron_rl.errors import UserError

TASK = ".cache/tiny_task"  # in the current directory, as the config names it


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "quickstart", run,
        overrides("objective.name=gspo"),
        help="Train a tiny model on a tiny task, in about a minute on two CPU cores.",
        description=f"Make a tiny task and model in {TASK} of the current directory unless they "
        "exist, and train the model into runs/. Needs no other file.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Make the task in a separate process, then train as `megatron-rl train` does."""
    config = str(files("megatron_rl.apps.tasks") / "quickstart.yaml")
    load_config(config, options.overrides)  # refuses wrong settings before anything is made
    train.check_installed()
    # A fork: what it imports does not stay in this process, which forks the ranks.
    making = multiprocessing.get_context("fork").Process(target=_make_task)
    making.start()
    making.join()
    if making.exitcode:
        raise UserError(f"the tiny task in {TASK} could not be made; the cause is above")
    options.config, options.print_config = config, False
    return train.run(options, ["train", "--config", config, *options.overrides])


def _make_task() -> None:
    sys.argv[1:] = ["--output", TASK]
    try:
        tiny_task.main()
    except OSError as error:  # a full disk, no permission, a file in place of the folder
        sys.exit(str(error))
