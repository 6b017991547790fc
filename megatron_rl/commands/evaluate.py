"""`megatron-rl eval`: score a model, or the trained model of a run."""

import argparse
import time
from pathlib import Path
from typing import Any

from megatron_rl.commands.ending import fail, leave, warn
from megatron_rl.commands.options import Commands, add_command, named, option
from megatron_rl.commands.train import check_devices, check_installed, check_place, rank_modules
from megatron_rl.config import Config, ConfigError, parse_config, with_absolute_paths
from megatron_rl.config.loading import apply_override, read_mapping, value_at
from megatron_rl.config.sections import HUB_NAME, ColumnsSection, expand_path
from megatron_rl.preflight.hub_names import resolve_hub_names
from megatron_rl.preflight.resources import find_writable
from megatron_rl.runtime.joining import join_processes, share_cores
from megatron_rl.runtime.launcher import start_processes
from megatron_rl.runtime.processes import (
    cuda_devices,
    quiet_libraries,
    without_garbage_collection,
)

# Config sections taken from a run.
FROM_RUN = ("seed", "data", "rollout", "reward", "environment", "workers", "eval")
# What an evaluation reads, and what of it it does not read, with what it reads instead.
READ = (*FROM_RUN, "parallel", "model.trust_remote_code", "trainer.dtype")
UNREAD = {
    "data.train": "--data",
    "data.mix": "--data",
    "data.epochs": "",
    "data.columns.completion": "",
    "eval.every": "",
    "rollout.temperature": "eval.temperature",
    "rollout.top_p": "eval.top_p",
    "rollout.top_k": "",
    "rollout.min_p": "",
    "rollout.prompts_per_step": "",
    "rollout.responses_per_prompt": "eval.samples",
    "parallel.virtual_stages": "",
    "parallel.stage_layers": "",
}


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "eval", run,
        named("--model", "Hugging Face folder, or a run directory: its trained model is evaluated "
              "with the run's settings.", metavar="FOLDER"),
        option("--data", "File of problems, in the format of data.train; may be given several "
               "times. Default: the run's evaluation sets.", action="append",
               metavar="[NAME=]FILE"),
        option("--output", "Folder to write; it must not exist. Default: evaluations/MODEL-TIME.",
               metavar="FOLDER"),
        option("overrides", "Settings, for example eval.samples=8, or parallel.data=2 for two "
               "processes.", nargs="*", metavar="key=value"),
        help="Compute avg@k, pass@k and maj@k of a model or a run, with confidence intervals.",
        description="Sample k responses to every problem and score them with the code that scores "
        "them in training. By default k is 32, with temperature 0.7 and top-p 0.9 (eval.samples, "
        "eval.temperature, eval.top_p).",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Evaluate; starts the processes of this node, or runs as one of them."""
    place = None
    try:
        place = join_processes()
        config = evaluation_config(options.model, options.data, options.overrides)
        check_place(config, place)
        config, *_ = resolve_hub_names(config, echo=warn)  # downloads before the ranks start
        if options.output is None:
            name = f"{Path(options.model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
            options.output = str(Path("evaluations") / name)
            arguments = [*arguments, "--output", options.output]
        output = _expand("--output", options.output)
        files = {
            f"--data {key.removeprefix('eval.sets.')}" if options.data else key: file
            for key, file in config.evaluation_files.items()
        }
        if place is None:
            return _start(config, files, output, arguments)
        quiet_libraries()
        with without_garbage_collection():
            from megatron_rl.trainer.evaluate_model import run_evaluation

        config = _with_output(config, output)
        run_evaluation(config, files, rank=place.rank, world_size=place.world_size)
    except Exception as error:  # noqa: BLE001 - reported; the process exits
        return fail(error, place)
    return leave(0)


def evaluation_config(model: str, data: list[str] | None, overrides: list[str]) -> Config:
    """Return a config that evaluates `model`, a folder or a run, on `data`.

    Only the settings that an evaluation needs are read from a run's config, so that no rule about
    training rejects it. Raises ConfigError for bad input.
    """
    folder = _expand("--model", model)
    values: dict[str, Any] = {}
    if (folder / "metrics.jsonl").is_file() or (folder / "log.txt").is_file():
        values = _settings_of_run(folder)
        folder = folder / "model"
    values["model"] = {**values.get("model", {}), "path": str(folder)}
    if data:
        named = list(map(_split_name, data))
        names = [name for name, _ in named]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"--data: two sets are called {duplicates[0]}; name them, as --data NAME=FILE"
            )
        values.setdefault("eval", {})["sets"] = dict(named)
    if isinstance(columns := value_at(values, "data.columns"), dict):
        columns.pop("completion", None)  # of an sft run
    for override in overrides:
        before = {key: value_at(values, key) for key in (*UNREAD, "eval.sets")}
        sets = {*(before["eval.sets"] or {})}
        apply_override(values, override)
        _check_is_read(override)
        if data and not sets <= {*(value_at(values, "eval.sets") or {})}:
            raise ConfigError("--data and eval.sets are both given; name all sets in one of them")
        for key, instead in UNREAD.items():
            if value_at(values, key) not in (None, before[key]):
                cure = f"set {instead}" if instead else "remove it"
                raise ConfigError(f"{key}: an evaluation does not use this setting; {cure}")
    if not values.get("eval", {}).get("sets"):
        raise ConfigError(_describe_missing_data(folder))
    # Values that satisfy the rules of a training config; an evaluation does not read them.
    unread: dict[str, dict[str, Any]] = {
        "data": {"train": "not read", "mix": {}},
        "rollout": {"prompts_per_step": 1, "responses_per_prompt": 8},
        "trainer": {"minibatches": 1, "stall_seconds": None},
    }
    for section, fixed in unread.items():
        if isinstance(given := values.get(section, {}), dict):
            values[section] = given | fixed
    return with_absolute_paths(parse_config(values))


def _expand(name: str, path: str) -> Path:
    try:
        return Path(expand_path(path))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _describe_missing_data(folder: Path) -> str:
    """Describe that no problems are named; a wrong model, which may be the cause, comes first."""
    problem = "--data: missing; name one or more files of problems"
    if folder.is_dir() and (folder / "config.json").is_file():
        return problem
    what = "is neither a run directory nor a model folder (it has no config.json)"
    if not folder.is_dir():
        what = "is not a folder"
    if HUB_NAME.fullmatch(str(folder)):
        what += "; as a name on the Hugging Face hub it needs --data"
    return f"this evaluation cannot start:\n  --model: {folder.absolute()} {what}\n  {problem}"


def _settings_of_run(folder: Path) -> dict[str, Any]:
    """Return the settings of a run that an evaluation of its trained model reads."""
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"{folder} has no trained model yet; evaluate a checkpoint by megatron-rl export "
            f"{folder} NEW, then --model NEW"
        )
    saved = read_mapping(folder / "config.yaml")
    values = {key: saved[key] for key in FROM_RUN if key in saved}
    for section, key in (("trainer", "dtype"), ("model", "trust_remote_code")):
        if key in saved.get(section, {}):
            values[section] = {key: saved[section][key]}
    return values


def _check_is_read(override: str) -> None:
    key = override.partition("=")[0].strip().lstrip("-")
    if not any(key == read or key.startswith(f"{read}.") for read in READ):
        raise ConfigError(
            f"{key}: an evaluation does not use this setting (it uses {', '.join(READ)}); remove it"
        )


def _split_name(argument: str) -> tuple[str, str]:
    name, equals, path = argument.partition("=")
    return (name, path) if equals and "/" not in name else (Path(argument).stem, argument)


def _with_output(config: Config, output: Path) -> Config:
    values = config.model_dump()
    values["run"] |= {"dir": str(output.absolute().parent), "name": output.name}
    return parse_config(values)


def _start(
    config: Config,
    files: dict[str, tuple[str, ColumnsSection]],
    output: Path,
    arguments: list[str],
) -> int:
    check_installed()
    if output.exists():
        raise ConfigError(f"--output: {output.absolute()} exists; name a new folder")
    find_writable(output.parent, key="--output")
    config = _with_output(config, output)  # validates the name
    world_size = config.parallel.data or max(cuda_devices(), config.rollout.tensor)
    share_cores(world_size)
    quiet_libraries()
    with without_garbage_collection():
        from megatron_rl.preflight.start import check_evaluation_run

        check_evaluation_run(config, files, world_size=world_size)
    check_devices(world_size)
    return leave(start_processes(arguments, world_size=world_size, modules=rank_modules()))
