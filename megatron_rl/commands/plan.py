"""`megatron-rl plan`: parallel layouts of a model, with their memory and time per step."""

import argparse
import contextlib
import math
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.commands.ending import leave, warn
from megatron_rl.commands.options import Commands, add_command, count, option, overrides
from megatron_rl.config import Config, ConfigError, apply_override, parse_config, read_config_values
from megatron_rl.config.loading import value_at
from megatron_rl.preflight.layout import too_long
from megatron_rl.runtime.processes import quiet_libraries

if TYPE_CHECKING:
    from megatron_rl.apps.planning.search import Search

CACHE = Path.home() / ".cache" / "megatron_rl" / "dry_runs"
# Config keys that fix one dimension of the layout -> its name in the search.
LAYOUT_KEYS = {
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "parallel.expert_tensor": "expert_tensor",
    "parallel.engine_ranks": "engine_ranks",
    "rollout.tensor": "rollout_tensor",
    "trainer.recompute": "recompute",
    "trainer.tokens_per_micro_batch": "tokens",
}
NOT_PLANNED = {  # config keys of the layout, and what decides them
    "parallel.data": "because it follows from --devices and the other sizes",
    "parallel.virtual_stages": "because layouts are searched with one stage on each rank",
    "parallel.stage_layers": "because layers are divided evenly",
}


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "plan", run,
        option("model", "Folder with a config.json, GGUF file, or model name.", metavar="MODEL"),
        option("--devices", "Total number of devices.", type=count, required=True, metavar="N"),
        option("--device", "Kind of device. Default: %(default)s.", default="h100", metavar="KIND"),
        option("--per-node", "Devices per node. Default: that of the kind.",
               type=count, metavar="N"),
        option("--config", "YAML file of a run to start from.", metavar="FILE"),
        option("--mean-response", "Mean response length. Default: 45%% of the limit.",
               type=count, metavar="TOKENS"),
        option("--mean-prompt", "Mean prompt length. Default: 160.", type=count, metavar="TOKENS"),
        option("--turns", "Mean turns of a conversation. Default: environment.max_turns.",
               type=count, metavar="N"),
        option("--answer-seconds", "Seconds in which an environment answers a turn: their mean, "
               "and their 95th percentile, by default the mean. Default: 0.",
               type=_answers, metavar="MEAN[,P95]"),
        option("--top", "Rows to print. Default: %(default)s.",
               type=count, default=10, metavar="N"),
        option("--rejected", "Also list every rejected layout and the reason."),
        option("--write", "Write the config of the layout in --choice.", metavar="FILE"),
        option("--choice", "Row of the table to describe and write. Default: %(default)s.",
               type=count, default=1, metavar="ROW"),
        overrides("trainer.epochs=4"),
        help="List the layouts of a model that fit, and their time per step.",
        description="List every layout of a model that fits a number of devices, fastest first, "
        "with memory and seconds of each phase, from dry runs (docs/planning.md), whose counts are "
        "kept in ~/.cache/megatron_rl. Lengths, "
        "batch sizes and epochs are taken from --config; parallel.* and rollout.tensor given as "
        "key=value are kept fixed, and rollout.gpu_memory_utilization is not exceeded. With a lag, "
        "engines on ranks of their own are tried too, unless parallel.engine_ranks is given.",
    )  # fmt: skip


def _answers(text: str) -> tuple[float, float]:
    try:
        mean, p95 = map(float, text.split(",") if "," in text else (text, text))
    except ValueError:
        mean = p95 = -1.0
    if not 0 <= mean <= p95 < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mean with a 95th percentile above it; write it as 60 or 60,180"
        )
    return mean, p95


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the table, and write the config of the chosen row if --write is given."""
    from megatron_rl.preflight.gguf_models import find_gguf, folder_of_gguf

    quiet_libraries()
    if (file := find_gguf(options.model)) is not None:
        options.model = str(folder_of_gguf(file, echo=warn, or_in=Path("runs") / "gguf"))
    print(_plan(options))
    return leave(0)


def _plan(options: argparse.Namespace) -> str:
    from megatron_rl.apps.planning.models import find_shape, with_built_in_model

    shape = find_shape(options.model)  # before the other imports, which take seconds
    from megatron_rl.apps.planning.generation import Answers, workload_of
    from megatron_rl.apps.planning.rates import find_device
    from megatron_rl.apps.planning.report import config_text, describe, require_fit
    from megatron_rl.apps.planning.search import DryRuns, Planner, search, shares

    config, fixed = _read(options)
    device = find_device(options.device)
    if options.per_node is not None:
        device = replace(device, per_node=options.per_node)
    answers = Answers(*options.answer_seconds) if any(options.answer_seconds or ()) else None
    workload = workload_of(
        config, mean_prompt=options.mean_prompt, mean_response=options.mean_response,
        turns=options.turns, answers=answers,
    )  # fmt: skip
    if answers is not None and workload.answers is None:
        raise ConfigError(
            "--answer-seconds: a single turn gets no answer that it waits for; set environment, or "
            "--turns to 2 or more"
        )
    workload.response_lengths()  # rejects an impossible mean before the search
    if answers is not None:
        answers.seconds(1)  # the same of answers
    if workload.longest > shape.max_position_embeddings:
        raise ConfigError(too_long(config, shape))
    has_lag = config.lag.batches > 0 or config.lag.policy is not None
    if has_lag and "engine_ranks" not in fixed:
        fixed["engine_ranks"] = (0, *shares(device, options.devices))
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(with_built_in_model(config, Path(folder)), shape, device, workload)
        if is_given(options.overrides, "rollout.gpu_memory_utilization"):
            planner = replace(planner, engine_share=config.rollout.gpu_memory_utilization)
        dry_runs = DryRuns(planner.config, folder=CACHE, workers=len(os.sched_getaffinity(0)))
        try:
            with _interruptible():
                result = search(
                    planner, dry_runs, options.devices, fixed,
                    top=max(options.top, options.choice), progress=warn,
                )  # fmt: skip
        finally:
            dry_runs.close()
    _require_measured(result)
    require_fit(result, planner)
    if not 1 <= options.choice <= len(result.options):
        raise ConfigError(f"--choice {options.choice}: give a row from 1 to {len(result.options)}")
    text = describe(
        result, planner, top=options.top, show_rejected=options.rejected, choice=options.choice
    )
    if options.write is None:
        return text
    file = Path(options.write)
    chosen = result.options[options.choice - 1]
    file.write_text(config_text(chosen, planner, config, options.devices), encoding="utf-8")
    return f"{text}\nwrote row {options.choice} to {file}"


def _require_measured(result: "Search") -> None:
    if result.is_interrupted and not result.options:
        raise ConfigError(
            "interrupted before a layout that fits was measured; dry runs are kept, so that the "
            "same command continues"
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for Ctrl-C or SIGTERM; a second one ends the command."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(options: argparse.Namespace) -> tuple[Config, dict[str, object]]:
    """Return the config to start from, and the layout dimensions that the overrides fix."""
    from megatron_rl.preflight.hub_names import with_gguf_folders

    values = {} if options.config is None else read_config_values(options.config)
    for override in options.overrides:
        apply_override(values, override)
    for key in NOT_PLANNED:
        if is_given(options.overrides, key):
            raise ConfigError(f"{key}: not planned, {NOT_PLANNED[key]}; leave it out")
    model = values.setdefault("model", {})
    if not model.get("path"):
        is_folder = Path(options.model).is_dir()
        model["path"] = options.model if is_folder else f"models/{options.model.split('/')[-1]}"
    data = values.setdefault("data", {})
    data["train"] = data.get("train") or "data/train.parquet"
    config = with_gguf_folders(parse_config(values), echo=warn)
    if config.data.epochs is not None:
        from megatron_rl.preflight.start import resolve_epochs

        config, _ = resolve_epochs(config, echo=warn)
    if options.write is not None:
        _check_new_file(Path(options.write))
    if (options.mean_prompt or 0) > config.data.max_prompt_tokens:
        raise ConfigError(
            f"--mean-prompt {options.mean_prompt} is above data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens}; lower it, or raise the limit"
        )
    fixed: dict[str, object] = {}
    for key, dimension in LAYOUT_KEYS.items():
        if is_given(options.overrides, key):
            section, _, name = key.partition(".")
            fixed[dimension] = getattr(getattr(config, section), name)
    if config.parallel.engine_ranks is not None or "engine_ranks" in fixed:
        fixed["engine_ranks"] = _check_split(config, options.devices)
    return config, fixed


def is_given(overrides: Sequence[str], key: str) -> bool:
    """Return True if arguments `key=value` set a key, or a section with it, also to null."""
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(given, override)
    section, _, name = key.rpartition(".")
    return name in (value_at(given, section) or {})


def _check_new_file(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"--write {file}: the file exists; name another one")
    folder = file.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--write {file}: {folder} is not a writable folder")


def _check_split(config: Config, devices: int) -> int:
    """Return the ranks that only generate, 0 if all do both; they must leave some that train."""
    number = config.parallel.engine_ranks or 0
    if number >= devices:
        raise ConfigError(
            f"parallel.engine_ranks={number} of {devices} devices leaves none that trains; lower "
            "it, or give more --devices"
        )
    return number
