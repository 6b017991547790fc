"""`megatron-rl dry-run`: memory, collectives and FLOPs of one rank, simulated without a device."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.options import Commands, add_command, count, option, overrides, positive
from megatron_rl.errors import UserError
from megatron_rl.runtime.processes import quiet_libraries

if TYPE_CHECKING:
    from megatron_rl.config import Config


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "dry-run", run,
        option("config", "YAML file of the run.", metavar="CONFIG"),
        option("--processes", "Total number of processes (one per device).",
               type=count, required=True, metavar="N"),
        option("--rank", "Ranks to simulate. Default: the first rank of the first, the middle and "
               "the last pipeline stage.", type=_ranks, metavar="R[,R...]"),
        option("--fit", "Memory of a device in GiB. Prints whether the run fits; if it does not, "
               "exits with status 3 and suggests settings that fit.", type=positive, metavar="GIB"),
        option("--host", "With --fit, memory of the host in GiB for each process: what the process "
               "pins there (optimizer states while the engine generates, the reference policy) "
               "must fit too. Default: not compared.", type=positive, metavar="GIB"),
        option("--device", "Kind of device to simulate; decides kernel workspaces and the dtype "
               "chosen by trainer.dtype=auto. Default: %(default)s.",
               choices=("cuda", "cpu"), default="cuda"),
        option("--json", "Print all results as JSON."),
        overrides("parallel.tensor=2"),
        help="Measure memory, collectives and FLOPs of a rank on a fake device.",
        description="Run the actor of one rank on a fake device and print its memory by phase, "
        "collectives, FLOPs and host stalls, together with the memory of the engine and of weight "
        "syncs. model.path may be a folder that contains only a config.json, or a model name known "
        "to `megatron-rl plan`. No data is read.",
    )  # fmt: skip


def _ranks(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks; write it as 0,255")
    return [int(part) for part in text.split(",")]


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the results of the dry run; exits with status 3 if the run does not fit."""
    quiet_libraries()
    import tempfile
    from pathlib import Path

    from megatron_rl.apps.planning.fit import DoesNotFitError
    from megatron_rl.apps.planning.models import with_built_in_model
    from megatron_rl.config import load_config
    from megatron_rl.preflight.hub_names import with_gguf_folders
    from megatron_rl.preflight.resources import DOES_NOT_FIT

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(options.config, options.overrides)
        config = with_gguf_folders(config, echo=_progress)
        try:
            text = _dry_run(with_built_in_model(config, Path(folder)), options)
        except DoesNotFitError as error:
            fail(error, None)
            return leave(DOES_NOT_FIT)
    print(text)
    return leave(0)


def _dry_run(config: "Config", options: argparse.Namespace) -> str:
    """Return the printed text; raises DoesNotFitError with settings that would fit."""
    from megatron_rl.apps.planning.dry_run import as_values, describe, dry_run_rank, stage_ranks
    from megatron_rl.apps.planning.fit import (
        check_fit,
        describe_phases,
        moments,
        response_bytes,
        summarize_fit,
        uncounted_loaders,
    )
    from megatron_rl.models.shape import read_model_shape
    from megatron_rl.preflight.layout import check_layout

    processes = options.processes
    if options.host is not None and options.fit is None:
        raise UserError("--host: no effect without --fit; give both, or leave it out")
    check_layout(config, read_model_shape(config.model.path), world_size=processes)
    trainers, _ = config.sides(processes)
    ranks = options.rank or stage_ranks(config, trainers)
    for rank in ranks:
        if not 0 <= rank < trainers:
            that = "of --processes" if trainers == processes else "that train"
            raise UserError(f"--rank {rank}: the ranks {that} are 0 to {trainers - 1}; give these")
    device_bytes = None if options.fit is None else int(options.fit * 2**30)
    host_bytes = None if options.host is None else int(options.host * 2**30)
    results = []
    if device_bytes is None:
        for rank in ranks:
            _progress(f"rank {rank} of {trainers}")
            results.append(
                dry_run_rank(
                    config, processes=trainers, rank=rank, device=options.device, updates=2
                )
            )
    else:
        results = check_fit(
            config,
            processes=processes,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            progress=_progress,
        )
    all_moments = [moments(config, result, device_bytes, host_bytes) for result in results]
    responses = response_bytes(config, trainers=trainers)
    if options.json:
        values = [
            as_values(result)
            | {"moments": [vars(moment) for moment in of_rank], "responses": vars(responses)}
            for result, of_rank in zip(results, all_moments, strict=True)
        ]
        return json.dumps(values)
    pages = []
    for result, of_rank in zip(results, all_moments, strict=True):
        tables = describe_phases(of_rank), uncounted_loaders(config, result)
        pages.append("\n".join([f"{describe(result)}\n", *filter(None, tables)]))
    flat = [moment for of_rank in all_moments for moment in of_rank]
    return "\n\n".join([str(responses), *pages, summarize_fit(flat)])


def _progress(message: str) -> None:
    """Print to standard error, so that standard output contains only the results."""
    print(f"dry run: {message}", file=sys.stderr, flush=True)
