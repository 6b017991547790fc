"""`megatron-rl rehearse`: what a rank of a run would hold, send and compute, without a device."""

import argparse
import json

from megatron_rl.commands.ending import fail, leave
from megatron_rl.processes import quiet_libraries


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    rehearse = commands.add_parser(
        "rehearse",
        help="what a rank of a run would hold, send and compute, without a device",
        description="Run the actor of one rank on a device that is not there: memory by phase, "
        "collectives, FLOPs, host stalls. The model's folder needs no more than its config.json; "
        "no data is read.",
    )
    rehearse.add_argument("config", metavar="CONFIG", help="YAML file")
    rehearse.add_argument("--processes", type=_count, required=True, metavar="N",
                          help="of the run, one per device")  # fmt: skip
    rehearse.add_argument(
        "--rank", type=_ranks, metavar="R[,R...]",
        help="by default the first of the first, the middle and the last pipeline stage",
    )  # fmt: skip
    rehearse.add_argument(
        "--fit", type=float, metavar="GIB",
        help="a device's memory: end with an error, and what cures it, where the run does not fit",
    )  # fmt: skip
    rehearse.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="what kernels allocate, and the dtype that trainer.dtype=auto means",
    )  # fmt: skip
    rehearse.add_argument("--json", action="store_true", help="print everything as JSON")
    rehearse.add_argument("overrides", nargs="*", metavar="key=value",
                          help="e.g. parallel.tensor=2")  # fmt: skip
    rehearse.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} names no ranks; give them as 0,255")
    return [int(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; give 1 or more")
    return int(text)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Rehearse, and print what was found; another status where the run does not fit."""
    quiet_libraries()
    from megatron_rl.config import load_config
    from megatron_rl.models.shape import read_model_shape
    from megatron_rl.planning.fit import DoesNotFitError, check_fit
    from megatron_rl.planning.rehearsal import rehearse, stage_ranks
    from megatron_rl.planning.rehearsal_report import as_values, describe
    from megatron_rl.preflight.layout import check_layout
    from megatron_rl.preflight.memory import DOES_NOT_FIT

    config, processes = load_config(options.config, options.overrides), options.processes
    check_layout(config, read_model_shape(config.model.path), world_size=processes)
    ranks = options.rank or stage_ranks(config, processes)
    for rank in ranks:
        if not 0 <= rank < processes:
            raise ValueError(
                f"--rank {rank}: there are {processes} processes; give 0 to {processes - 1}"
            )
    if options.fit is None:
        made = [
            rehearse(config, processes=processes, rank=rank, device=options.device, updates=2)
            for rank in ranks
        ]
    else:
        try:
            made = check_fit(config, processes=processes, device_bytes=int(options.fit * 2**30))
        except DoesNotFitError as error:
            fail(error, None)
            return leave(DOES_NOT_FIT)
    if options.json:
        print(json.dumps([as_values(each) for each in made]))
    else:
        print("\n\n".join(describe(each) for each in made))
    return leave(0)
