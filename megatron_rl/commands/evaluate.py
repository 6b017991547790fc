"""`megatron-rl eval`: score a model, or what a run has trained."""

import argparse
import time
from pathlib import Path
from typing import Any

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.train import check_devices
from megatron_rl.config import Config, ConfigError, load_config, parse_config, with_absolute_paths
from megatron_rl.config.data_sections import ColumnsSection
from megatron_rl.config.loading import apply_override
from megatron_rl.processes import cuda_devices, join_processes, quiet_libraries, start_processes


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    evaluate = commands.add_parser(
        "eval",
        help="Avg@k, pass@k and maj@k of a model or a run, with intervals",
        description="Sample k responses to every problem and score them, by the code that scores "
        "them in training. By default k is 32 at temperature 0.7 and top-p 0.9 (eval.samples, "
        "eval.temperature, eval.top_p).",
    )
    evaluate.add_argument(
        "--model", required=True, metavar="FOLDER",
        help="Hugging Face folder; or a run directory: its trained model, with its settings",
    )  # fmt: skip
    evaluate.add_argument(
        "--data", action="append", metavar="[NAME=]FILE",
        help="problems, .parquet or .jsonl; may be given several times; default: the run's sets",
    )  # fmt: skip
    evaluate.add_argument(
        "--output", metavar="FOLDER", help="a new one; default: evaluations/MODEL-TIME"
    )
    evaluate.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help="e.g. eval.samples=8, or parallel.data=2 for two processes",
    )  # fmt: skip
    evaluate.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Evaluate; starts the processes of this node, or is one of them."""
    place = None
    try:
        place = join_processes()
        config = evaluation_config(options.model, options.data, options.overrides)
        if options.output is None:
            name = f"{Path(options.model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
            options.output = str(Path("evaluations") / name)
            arguments = [*arguments, "--output", options.output]
        files = {
            f"--data {key.removeprefix('eval.sets.')}" if options.data else key: file
            for key, file in config.evaluation_files.items()
        }
        if place is None:
            return _start(config, files, Path(options.output), arguments)
        quiet_libraries()
        from megatron_rl.trainer.evaluate_model import run_evaluation

        config = _into(config, Path(options.output))
        run_evaluation(config, files, rank=place.rank, world_size=place.world_size)
    except Exception as error:  # noqa: BLE001 - said, and the process ends
        return fail(error, place)
    return leave(0)


def evaluation_config(model: str, data: list[str] | None, overrides: list[str]) -> Config:
    """A config that evaluates `model`, a folder or a run, on `data`; ConfigError if it cannot."""
    values: dict[str, Any] = {}
    folder = Path(model)
    if (folder / "metrics.jsonl").is_file() or (folder / "log.txt").is_file():
        values = load_config(folder / "config.yaml").model_dump()
        if not (folder / "model").is_dir():
            raise ConfigError(
                f"{folder} has no trained model yet; evaluate a checkpoint by megatron-rl convert "
                f"--from {folder} --to NEW, then --model NEW"
            )
        folder = folder / "model"
    # Whatever layout trained it: one engine on each `rollout.tensor` processes.
    values |= {"parallel": {}, "trainer": {"dtype": values.get("trainer", {}).get("dtype", "auto")}}
    values.setdefault("model", {})["path"] = str(folder)
    if data:
        named = list(map(_named, data))
        if twice := sorted({name for name, _ in named if [n for n, _ in named].count(name) > 1}):
            raise ConfigError(
                f"--data: two sets are called {twice[0]}; tell them apart, as --data NAME=FILE"
            )
        values.setdefault("eval", {})["sets"] = dict(named)
    values.setdefault("data", {})["mix"] = {}
    values["data"]["train"] = "not read"
    values.setdefault("rollout", {})["prompts"] = 1
    values["trainer"]["minibatches"] = 1
    for override in overrides:
        apply_override(values, override)
    if not values.get("eval", {}).get("sets"):
        raise ConfigError("--data: missing; name one or more files of problems")
    return with_absolute_paths(parse_config(values))


def _named(argument: str) -> tuple[str, str]:
    name, equals, path = argument.partition("=")
    return (name, path) if equals and "/" not in name else (Path(argument).stem, argument)


def _into(config: Config, output: Path) -> Config:
    values = config.model_dump()
    values["run"] |= {"dir": str(output.absolute().parent), "name": output.name}
    return parse_config(values)


def _start(
    config: Config,
    files: dict[str, tuple[str, ColumnsSection]],
    output: Path,
    arguments: list[str],
) -> int:
    from megatron_rl.preflight.settings import check_evaluation

    if output.exists():
        raise ConfigError(f"--output: {output} exists; name a new folder")
    config = _into(config, output)  # whether it can be named so
    world_size = config.parallel.data or max(cuda_devices(), config.rollout.tensor)
    check_evaluation(config, files, world_size=world_size)
    check_devices(world_size)
    return start_processes(arguments, world_size=world_size)
