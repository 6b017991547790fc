"""`megatron-rl train`: start the processes of this node, or join those that were started."""

import argparse
import os
import sys
import time
from pathlib import Path

from megatron_rl.commands.ending import fail, leave
from megatron_rl.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
    with_absolute_paths,
)
from megatron_rl.interruption import INTERRUPTED, Interruption, RunInterrupted
from megatron_rl.processes import (
    LAUNCHER,
    cuda_devices,
    cuda_memory,
    join_processes,
    quiet_libraries,
    start_processes,
    without_garbage_collection,
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    train = commands.add_parser(
        "train",
        help="train from a config",
        description="Train. Starts the processes of this node itself, as many as the layout "
        "needs, or joins them when torchrun or srun started it.",
    )
    train.add_argument("--config", required=True, help="YAML file")
    train.add_argument("--print-config", action="store_true", help="show the resolved config, exit")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.steps=5")
    train.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place, config, interruption = None, None, Interruption()
    try:
        place = join_processes()
        if place is not None:
            # Before anything is imported that starts threads.
            interruption.listen(speaks=place.rank == 0)
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        config = with_absolute_paths(config)
        if place is None:
            return _start(config, options, arguments)
        quiet_libraries()
        if place.rank == 0 and LAUNCHER not in os.environ:  # else whoever started it has asked
            _check_memory(config, place.world_size)
        with without_garbage_collection():
            from megatron_rl.trainer.build import run_training

        run_training(
            config, rank=place.rank, world_size=place.world_size, interruption=interruption
        )
    except RunInterrupted:
        return leave(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - said, logged, and the process ends
        return fail(error, place, config)
    return leave(0)


def _start(config: Config, options: argparse.Namespace, arguments: list[str]) -> int:
    from megatron_rl.preflight.settings import check_settings
    from megatron_rl.runs.directory import RunDirectory

    world_size = config.parallel.model_size * (config.parallel.data or _default_replicas(config))
    if config.run.name is None:  # decided once, here, so that all processes agree
        name = f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        arguments = [*arguments, f"run.name={name}"]
        values = config.model_dump()
        values["run"]["name"] = name
        config = parse_config(values)
    check_settings(config, world_size=world_size)
    check_devices(world_size)
    _check_memory(config, world_size)
    find_stall = RunDirectory.of(config).new_stalls()
    return start_processes(arguments, world_size=world_size, find_stall=find_stall)


def _check_memory(config: Config, world_size: int) -> None:
    from megatron_rl.preflight.memory import check_memory

    warning = check_memory(config, world_size=world_size, device_bytes=cuda_memory())
    if warning is not None:
        print(f"megatron-rl: {warning}", file=sys.stderr, flush=True)


def check_devices(world_size: int) -> None:
    """ConfigError if this node has fewer devices than the processes that it is to run."""
    devices = cuda_devices()
    if 0 < devices < world_size:
        raise ConfigError(
            f"the layout needs {world_size} processes, one per device, and this node has {devices} "
            "devices; lower parallel.*, or start the processes of several nodes by torchrun or srun"
        )


def _default_replicas(config: Config) -> int:
    return max(cuda_devices() // config.parallel.model_size, 1)
