"""`megatron-rl convert`: models between Hugging Face's format and distributed checkpoints."""

import argparse

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.train import check_devices
from megatron_rl.processes import join_processes, quiet_libraries, start_processes


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    convert = commands.add_parser(
        "convert",
        help="a model between Hugging Face's format and a distributed checkpoint",
        description="Convert a Hugging Face folder into a distributed checkpoint, or the other way "
        "round; which one follows from what --from holds. Starts as many processes as the layout "
        "needs, or joins those of torchrun or srun.",
    )
    convert.add_argument(
        "--from", required=True, dest="source", metavar="PATH",
        help="Hugging Face folder; or a checkpoint, or a run directory (its newest checkpoint)",
    )  # fmt: skip
    convert.add_argument("--to", required=True, dest="target", metavar="PATH", help="a new folder")
    convert.add_argument(
        "--like", metavar="PATH",
        help="Hugging Face folder that gives a checkpoint's config and tokenizer; by default the "
        "model that the checkpoint's run was trained from",
    )  # fmt: skip
    convert.add_argument("--dry-run", action="store_true", help="print the table of names, exit")
    convert.add_argument("overrides", nargs="*", metavar="parallel.KEY=value",
                         help="e.g. parallel.tensor=2")  # fmt: skip
    convert.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place = None
    try:
        place = join_processes()
        quiet_libraries()
        from megatron_rl.conversion.plan import describe_dry_run, plan_conversion, run_conversion

        conversion = plan_conversion(
            options.source, options.target, like=options.like, overrides=options.overrides
        )
        if options.dry_run:
            print(describe_dry_run(conversion))
            return 0
        if place is None:
            check_devices(conversion.layout.world_size)
            return start_processes(arguments, world_size=conversion.layout.world_size)
        run_conversion(conversion)
    except Exception as error:  # noqa: BLE001 - said, and the process ends
        return fail(error, place)
    return leave(0)
