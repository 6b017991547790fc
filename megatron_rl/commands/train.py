"""`megatron-rl train`: start the ranks of this node, or run as one rank of torchrun or srun."""

import argparse
import importlib.util
import os
import time
from pathlib import Path

from megatron_rl.commands.ending import fail, how_to_continue, leave, warn
from megatron_rl.commands.options import Commands, add_command, named, option, overrides
from megatron_rl.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
    with_absolute_paths,
)
from megatron_rl.preflight.hub_names import resolve_hub_names
from megatron_rl.runs.files import is_finished
from megatron_rl.runtime.interruption import INTERRUPTED, Interruption, RunInterrupted
from megatron_rl.runtime.joining import ALONE, ProcessPlace, join_processes, share_cores
from megatron_rl.runtime.launcher import start_processes
from megatron_rl.runtime.processes import (
    LAUNCHER,
    cuda_devices,
    cuda_memory,
    describe_address_space,
    describe_slow_bfloat16,
    has_cuda,
    quiet_libraries,
    without_garbage_collection,
)

# Imported once by the launcher for all ranks: the trainer, and the parts of vLLM that it needs.
TRAINER_MODULES = ("megatron_rl.trainer.build", "megatron_rl.trainer.evaluate_model")
ENGINE_MODULES = ("vllm.entrypoints.llm", "megatron_rl.engine.inproc")
CPU_WORKER_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "train", run,
        named("--config", "YAML file of the run.", metavar="CONFIG"),
        option("--print-config", "Print the resolved config and exit."),
        overrides("trainer.steps=5"),
        help="Train a model from a config.",
        description="Train a model. Starts as many processes on this node as the layout needs, or "
        "runs as one of them when started by torchrun or srun.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place, config, interruption = None, None, Interruption()
    try:
        place = join_processes()
        if place is not None:
            # Block the signals before any import starts threads.
            interruption.listen(is_main_rank=place.rank == 0)
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        config, resolved, _ = resolve_hub_names(with_absolute_paths(config), echo=warn)
        config, steps = _resolve_epochs(config, is_main_rank=place is None or place.rank == 0)
        arguments = [*arguments, *resolved, *steps]
        check_place(config, place)
        if LAUNCHER not in os.environ and _is_finished(config):  # else the launcher checked it
            if place is None or place.rank == 0:
                _print_finished(config)
            return 0 if place is None else leave(0)
        if place is None:
            return _start(config, options, arguments)
        quiet_libraries()
        if place.rank == 0 and LAUNCHER not in os.environ:  # else the launcher checked it
            _check_memory(config, place.world_size)
        with without_garbage_collection():
            from megatron_rl.trainer.build import run_training

        run_training(
            config, rank=place.rank, world_size=place.world_size, interruption=interruption
        )
    except RunInterrupted:
        return leave(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - reported and logged; the process exits
        return fail(error, place, config)
    return leave(0)


def check_place(config: Config, place: ProcessPlace | None) -> None:
    """Raise ConfigError if variables of the environment give a number of ranks that does not fit.

    They may be left over. torchrun and srun set other variables, too.
    """
    started = {LAUNCHER, "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"} & set(os.environ)
    if place is not None and not started and (found := config.process_problems(place.world_size)):
        raise ConfigError(
            f"{found[0]}; their number is WORLD_SIZE={place.world_size} of the environment, "
            f"next to RANK={place.rank}: {ALONE} if these are left over"
        )


def _resolve_epochs(config: Config, *, is_main_rank: bool) -> tuple[Config, list[str]]:
    if config.data.epochs is None:  # before the imports
        return config, []
    from megatron_rl.preflight.start import resolve_epochs

    return resolve_epochs(config, echo=warn if is_main_rank else lambda text: None)


def check_installed() -> None:
    """Raise ModuleNotFoundError for a library without which no rank can run; imports none."""
    for name in ("torch", "vllm", "megatron"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"no {name}", name=name)


def _print_finished(config: Config) -> None:
    steps = config.trainer.steps
    print(
        f"{config.run.name} is finished: all {steps} steps are done, and the trained model is in "
        f"{Path(config.run.dir) / str(config.run.name) / 'model'}; set trainer.steps above {steps} "
        "to continue training"
    )


def _is_finished(config: Config) -> bool:
    """Return True if the config's run has completed all steps and exported its model.

    Does not import torch, which takes seconds. Raises ConfigError if the run directory belongs to
    another experiment.
    """
    folder = Path(config.run.dir) / str(config.run.name)
    if config.run.resume == "never" or not is_finished(folder, steps=config.trainer.steps):
        return False
    saved = with_absolute_paths(load_config(folder / "config.yaml"))
    if saved.model_dump(exclude={"run"}) != config.model_dump(exclude={"run"}):
        from megatron_rl.runs.directory import RunDirectory

        directory = RunDirectory(folder)
        if any(not key.startswith("run.") for key in directory.changes(config)):
            directory.check_usable(config)
    return True


def _start(config: Config, options: argparse.Namespace, arguments: list[str]) -> int:
    check_installed()  # before the inputs are checked: no rank can run
    from megatron_rl.preflight.layout import default_world_size

    world_size = default_world_size(config)
    share_cores(world_size)
    quiet_libraries()
    with without_garbage_collection():
        from megatron_rl.preflight.start import check_run
        from megatron_rl.runs.directory import RunDirectory

    if config.run.name is None:  # chosen here once, so that all processes use the same name
        name = f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        arguments = [*arguments, f"run.name={name}"]
        values = config.model_dump()
        values["run"]["name"] = name
        config = parse_config(values)
    RunDirectory.of(config).check_free()
    with without_garbage_collection():  # mostly the import of transformers
        check_run(config, world_size=world_size)
    check_devices(world_size)
    for warning in (describe_address_space(), describe_slow_bfloat16(config.trainer.dtype)):
        if warning is not None:
            warn(warning)
    _check_memory(config, world_size)
    find_stall = RunDirectory.of(config).new_stalls()
    status = start_processes(
        arguments,
        world_size=world_size,
        modules=rank_modules(with_engine=config.offline.rollouts is None),
        find_stall=find_stall,
        to_continue=lambda: how_to_continue(config),
    )
    return leave(status)


def rank_modules(*, with_engine: bool = True) -> tuple[str, ...]:
    """Return the modules that the launcher imports for all ranks."""
    if not with_engine:
        return TRAINER_MODULES
    return TRAINER_MODULES + ENGINE_MODULES + (() if has_cuda() else CPU_WORKER_MODULES)


def _check_memory(config: Config, world_size: int) -> None:
    from megatron_rl.preflight.resources import check_memory, host_memory

    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    warning = check_memory(
        config,
        world_size=world_size,
        device_bytes=cuda_memory(),
        host_bytes=host_memory() // on_this_node,
    )
    if warning is not None:
        warn(warning)


def check_devices(world_size: int) -> None:
    """Raise ConfigError if this node has fewer CUDA devices than processes to start."""
    devices = cuda_devices()
    if 0 < devices < world_size:
        raise ConfigError(
            f"the layout needs {world_size} processes, one per device, and this node has {devices} "
            "devices; lower parallel.*, or start the processes of several nodes by torchrun or srun"
        )
