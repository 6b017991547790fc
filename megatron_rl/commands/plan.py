"""`megatron-rl plan`: every layout of a model on some devices, its memory and its time."""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_rl.commands.ending import leave
from megatron_rl.config import Config, ConfigError, apply_override, parse_config, read_mapping

# Keys of a config that decide a part of the layout, by the name of that part.
DECIDE = {
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "rollout.tensor": "rollout_tensor",
    "trainer.recompute": "recompute",
    "trainer.tokens_per_micro_batch": "tokens",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    plan = commands.add_parser(
        "plan",
        help="which layouts of a model fit some devices, and how long a step takes",
        description="List every layout of a model on a number of devices that fits, the fastest "
        "first, with the memory and the seconds of every phase, by formula (docs/planning.md). "
        "What a config says of lengths, batch and epochs is read; parallel.* and "
        "rollout.tensor that are given as key=value are kept.",
    )
    plan.add_argument("model", metavar="MODEL", help="a folder with a config.json, or a name")
    plan.add_argument("--devices", type=int, required=True, metavar="N", help="in all")
    plan.add_argument("--device", default="h100", metavar="KIND", help="by default h100")
    plan.add_argument("--per-node", type=int, metavar="N", help="devices of a node")
    plan.add_argument("--config", metavar="FILE", help="YAML file to begin with")
    plan.add_argument("--mean-response", type=int, metavar="TOKENS",
                      help="by default 45%% of the longest allowed")  # fmt: skip
    plan.add_argument("--mean-prompt", type=int, metavar="TOKENS", help="by default 160")
    plan.add_argument("--top", type=int, default=10, metavar="N", help="rows; by default 10")
    plan.add_argument("--rejected", action="store_true", help="list every rejected layout")
    plan.add_argument("--write", metavar="FILE", help="write the config of a layout")
    plan.add_argument("--choice", type=int, default=1, metavar="ROW", help="which; by default 1")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.epochs=4")
    plan.set_defaults(run=run, sets_environment=False)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the table; write a row's config."""
    print(_plan(options))
    return leave(0)


def _plan(options: argparse.Namespace) -> str:
    from megatron_rl.planning.built_in import find_shape
    from megatron_rl.planning.devices import find_device
    from megatron_rl.planning.layout_report import config_text, describe, plan
    from megatron_rl.planning.workload import workload_of

    config, fixed = _read(options)
    device = find_device(options.device)
    if options.devices < 1:
        raise ConfigError(f"--devices {options.devices}: give 1 or more")
    if options.per_node is not None:
        if options.per_node < 1:
            raise ConfigError(f"--per-node {options.per_node}: give 1 or more")
        device = replace(device, per_node=options.per_node)
    shape = find_shape(options.model)
    workload = workload_of(
        config, mean_prompt=options.mean_prompt, mean_response=options.mean_response
    )
    workload.response_lengths()  # an impossible mean is refused first
    if workload.longest > shape.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {workload.longest} exceed the "
            f"model's {shape.max_position_embeddings} positions; lower one of them"
        )
    found = plan(shape, device, options.devices, workload, fixed)
    text = describe(found, top=options.top, show_rejected=options.rejected)
    if options.write is None:
        return text
    if not 1 <= options.choice <= len(found.options):
        raise ConfigError(f"--choice {options.choice}: there are rows 1 to {len(found.options)}")
    file = Path(options.write)
    if file.exists():
        raise ConfigError(f"--write {file}: it is there already; name another file")
    file.write_text(config_text(found.options[options.choice - 1], config, found))
    return f"{text}\nwrote row {options.choice} to {file}"


def _read(options: argparse.Namespace) -> tuple[Config, dict[str, object]]:
    """The config to begin with, and what the overrides decide of the layout."""
    values = {} if options.config is None else read_mapping(options.config)
    for override in options.overrides:
        apply_override(values, override)
    model = values.setdefault("model", {})
    if not model.get("path"):
        is_folder = Path(options.model).is_dir()
        model["path"] = options.model if is_folder else f"models/{options.model.split('/')[-1]}"
    data = values.setdefault("data", {})
    data["train"] = data.get("train") or "data/train.parquet"
    config = parse_config(values)
    fixed: dict[str, object] = {}
    for override in options.overrides:
        key = override.partition("=")[0]
        if key in DECIDE:
            section, _, name = key.partition(".")
            fixed[DECIDE[key]] = getattr(getattr(config, section), name)
    return config, fixed
