"""`megatron-rl convert`: convert between Hugging Face's format and distributed checkpoints."""

import argparse
import sys

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.options import Commands, add_command, option
from megatron_rl.commands.train import check_devices
from megatron_rl.preflight.hub_names import resolve_model
from megatron_rl.runtime.joining import join_processes
from megatron_rl.runtime.processes import quiet_libraries, start_processes


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "convert", run,
        option("--from", "Hugging Face folder, name of a model on the hub, checkpoint, or run "
               "directory (its newest checkpoint is used).",
               required=True, dest="source", metavar="PATH"),
        option("--to", "Folder to write; it must not exist.",
               required=True, dest="target", metavar="PATH"),
        option("--like", "Hugging Face folder from which a checkpoint's config and tokenizer are "
               "copied. Default: the model from which the checkpoint's run was trained.",
               metavar="PATH"),
        option("--dry-run", "Print the table of tensor names and exit."),
        option("overrides", "Parallel layout, for example parallel.tensor=2.",
               nargs="*", metavar="parallel.KEY=value"),
        help="Convert between Hugging Face's format and a distributed checkpoint.",
        description="Convert a Hugging Face folder into a distributed checkpoint, or a checkpoint "
        "into a Hugging Face folder; the contents of --from decide which. Starts as many processes "
        "as the layout needs, or runs as one of them when started by torchrun or srun.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place = None
    try:
        place = join_processes()
        quiet_libraries()
        from megatron_rl.conversion.conversion_plan import (
            describe_dry_run,
            plan_conversion,
            run_conversion,
        )

        source = resolve_model(options.source, echo=lambda line: print(line, file=sys.stderr))
        conversion = plan_conversion(
            source, options.target, like=options.like, overrides=options.overrides
        )
        if options.dry_run:
            print(describe_dry_run(conversion))
            return 0
        if place is None:
            check_devices(conversion.layout.world_size)
            return start_processes(arguments, world_size=conversion.layout.world_size)
        run_conversion(conversion)
    except Exception as error:  # noqa: BLE001 - reported; the process exits
        return fail(error, place)
    return leave(0)
