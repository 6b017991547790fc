"""The command `megatron-rl`."""

import argparse
import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from megatron_rl.config import Config, ConfigError, dump_config, load_config, parse_config
from megatron_rl.interruption import Interruption, RunInterrupted
from megatron_rl.processes import (
    INTERRUPTED,
    ProcessPlace,
    has_cuda,
    join_processes,
    prepare_environment,
    quiet_libraries,
    start_processes,
)

EXIT_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits non-zero with one clear message when something is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    prepare_environment()
    sys.exit(options.run(options, arguments))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron-rl", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train from a config",
        description="Train. Starts the processes of this node itself, as many as the layout "
        "needs, or joins them when torchrun or srun started it.",
    )
    train.add_argument("--config", required=True, help="YAML file")
    train.add_argument("--print-config", action="store_true", help="show the resolved config, exit")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.steps=5")
    train.set_defaults(run=_train)
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
    convert.set_defaults(run=_convert)
    doctor = commands.add_parser("doctor", help="what this machine has and what will be used")
    doctor.set_defaults(run=_doctor)
    options, rest = parser.parse_known_args(arguments)
    for word in rest:  # overrides may stand before and after options
        if word.startswith("-") or "=" not in word or "overrides" not in options:
            parser.error(f"unknown argument {word!r}; settings are given as key=value")
        options.overrides.append(word)
    return options


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    place, config, interruption = None, None, Interruption()
    try:
        place = join_processes()
        if place is not None:
            interruption.listen()  # before anything is imported that starts threads
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        if place is None:
            return _start(config, options, arguments)
        quiet_libraries()
        from megatron_rl.trainer.build import run_training

        run_training(
            config, rank=place.rank, world_size=place.world_size, interruption=interruption
        )
    except RunInterrupted:
        interruption.settle()
        return _leave(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - said, logged, and the process ends
        return _fail(error, place, config)
    return _leave(0)


def _fail(error: Exception, place: ProcessPlace | None, config: Config | None = None) -> int:
    """Say what went wrong; a rank of a run also leaves its traceback in the log, and ends."""
    if isinstance(error, ValueError):
        _say_error(error, place)
    elif place is None:
        raise error
    else:
        print(f"megatron-rl: rank {place.rank} failed", file=sys.stderr)
        traceback.print_exception(error)
    if place is None:
        return 1
    if config is not None and _is_training():  # before, the run directory may be another run's
        _log_failure(error, place, config)
    # What it waits for at the exit may have failed too.
    deadline = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    return _leave(1)


def _log_failure(error: Exception, place: ProcessPlace, config: Config) -> None:
    from megatron_rl.trainer.console import Console
    from megatron_rl.trainer.preflight import run_directory

    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # a full disk, perhaps the very error
        log = Console(speaks=True, log_file=run_directory(config).log_file)
        log.log(f"rank {place.rank} failed\n{trace}")


def _leave(status: int) -> NoReturn:
    """End this process without the interpreter's own end."""
    # vLLM and Triton only complain when the interpreter takes them down. What was registered for
    # the exit must run all the same: it ends the checkpoint writer's processes.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _say_error(error: ValueError, place: ProcessPlace | None) -> None:
    """Once on each node for what every rank finds before training, later by the rank that fails."""
    if place is None or place.local_rank == 0:
        detail = "" if isinstance(error, ConfigError) else _origin(error)
        print(f"megatron-rl: error: {error}{detail}", file=sys.stderr, flush=True)
    elif _is_training():
        print(f"megatron-rl: rank {place.rank}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # whoever ends first ends all: the rank that speaks must come first


def _is_training() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _start(config: Config, options: argparse.Namespace, arguments: list[str]) -> int:
    from megatron_rl.trainer.preflight import check_settings

    world_size = config.parallel.model_size * (config.parallel.data or _default_replicas(config))
    if config.run.name is None:  # decided once, here, so that all processes agree
        name = f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        arguments = [*arguments, f"run.name={name}"]
        values = config.model_dump()
        values["run"]["name"] = name
        config = parse_config(values)
    check_settings(config, world_size=world_size)
    _check_devices(world_size)
    return start_processes(arguments, world_size=world_size)


def _check_devices(world_size: int) -> None:
    if not has_cuda():
        return
    import torch

    if world_size > (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"the layout needs {world_size} processes, one per device, and this node has {devices} "
            "devices; lower parallel.*, or start the processes of several nodes by torchrun or srun"
        )


def _default_replicas(config: Config) -> int:
    if not has_cuda():
        return 1
    import torch

    return max(torch.cuda.device_count() // config.parallel.model_size, 1)


def _convert(options: argparse.Namespace, arguments: list[str]) -> int:
    place = None
    try:
        place = join_processes()
        quiet_libraries()
        from megatron_rl.trainer.conversion import describe_dry_run, plan_conversion, run_conversion

        conversion = plan_conversion(
            options.source, options.target, like=options.like, overrides=options.overrides
        )
        if options.dry_run:
            print(describe_dry_run(conversion))
            return 0
        if place is None:
            _check_devices(conversion.layout.world_size)
            return start_processes(arguments, world_size=conversion.layout.world_size)
        run_conversion(conversion)
    except Exception as error:  # noqa: BLE001 - said, and the process ends
        return _fail(error, place)
    return _leave(0)


def _doctor(options: argparse.Namespace, arguments: list[str]) -> int:
    from megatron_rl.doctor import print_report

    return print_report()


def _origin(error: ValueError) -> str:
    """The place of an error that is not about the config: the innermost frame of our own code."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "megatron_rl" in Path(frame.filename).parts
    ]  # fmt: skip
    if not frames:
        return ""
    return f"  [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"


if __name__ == "__main__":
    main()
