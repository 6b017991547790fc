"""`megatron-rl export`: write a checkpoint as a Hugging Face folder."""

import argparse

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.options import Commands, add_command, option
from megatron_rl.commands.train import check_devices
from megatron_rl.runtime.joining import join_processes
from megatron_rl.runtime.launcher import start_processes
from megatron_rl.runtime.processes import quiet_libraries


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "export", run,
        option("checkpoint", "Run directory (its newest checkpoint is used) or checkpoint.",
               metavar="CHECKPOINT"),
        option("folder", "Hugging Face folder to write; it must not exist.", metavar="FOLDER"),
        option("--like", "Hugging Face folder from which config and tokenizer are copied. Default: "
               "the model from which the checkpoint's run was trained.", metavar="PATH"),
        option("overrides", "Parallel layout, for example parallel.tensor=2.",
               nargs="*", metavar="parallel.KEY=value"),
        help="Write a checkpoint as a Hugging Face folder.",
        description="Write the weights of a checkpoint as a Hugging Face folder. Starts as many "
        "processes as the layout needs, or runs as one of them when started by torchrun or srun.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place = None
    try:
        place = join_processes()
        quiet_libraries()
        from megatron_rl.checkpoint_export import plan_export, run_export

        plan = plan_export(
            options.checkpoint, options.folder, like=options.like, overrides=options.overrides
        )
        if place is None:
            check_devices(plan.layout.world_size)
            modules = ("megatron_rl.checkpoint_export",)  # imported here already
            size = plan.layout.world_size
            return leave(start_processes(arguments, world_size=size, modules=modules))
        run_export(plan)
    except Exception as error:  # noqa: BLE001 - reported; the process exits
        return fail(error, place)
    return leave(0)
