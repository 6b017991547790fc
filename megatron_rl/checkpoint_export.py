"""Plan, checks and execution of `megatron-rl export`: a checkpoint as a Hugging Face folder."""

import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.actor.checkpoint_contents import CRITIC, FOLDER, check_stored, is_checkpoint
from megatron_rl.actor.weights import stored_dtypes
from megatron_rl.config import (
    ConfigError,
    ParallelSection,
    apply_override,
    load_config,
    parse_config,
)
from megatron_rl.models.shape import ModelShape, read_critic_shape, read_model_shape, tensor_shapes
from megatron_rl.models.stored_tensors import further_tensors
from megatron_rl.preflight.layout import cut_problems
from megatron_rl.preflight.resources import find_writable
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.telemetry.console import Console


@dataclass(frozen=True)
class CheckpointExport:
    """An export that has passed every check of its files.

    like: model folder that provides config, tokenizer files and dtypes; mebibytes: of the tensors.
    shape: with a value head for a critic.
    """

    checkpoint: Path
    folder: Path
    like: Path
    shape: ModelShape
    layout: ActorLayout
    mebibytes: float


def plan_export(
    source: str | Path,
    target: str | Path,
    *,
    like: str | None,
    overrides: list[str],
    critic: bool = False,
) -> CheckpointExport:
    """Find the checkpoint of a path and check its export, without writing anything.

    critic: export the critic instead of the policy. Raises ValueError with a hint.
    """
    source, target = Path(source), Path(target)
    checkpoint = _find_checkpoint(source, CRITIC if critic else FOLDER)
    other, named = (FOLDER, "policy") if critic else (CRITIC, "critic")
    if is_checkpoint(source) and source.name == other:
        raise ConfigError(
            f"{source.absolute()} is the {named}'s; give the folder that it is in, or "
            + ("leave out --critic" if critic else "--critic")
        )
    if checkpoint is None and critic and _find_checkpoint(source, FOLDER) is not None:
        raise ConfigError(
            f"{source.absolute()} was trained without a critic; export the policy, without --critic"
        )
    if checkpoint is None:
        kind = " but a Hugging Face folder" if (source / "config.json").is_file() else ""
        raise ConfigError(
            f"{source.absolute()} is no checkpoint of a run{kind}; give a run directory, or one of "
            "its checkpoints/step_NNNNNN"
        )
    if target.exists():
        raise ConfigError(f"{target.absolute()} exists and is never overwritten; choose another")
    model = _find_model_folder(checkpoint, like, critic=critic)
    shape = replace(read_critic_shape(model), head="value") if critic else read_model_shape(model)
    check_stored(checkpoint, shape)
    dtypes, sizes = stored_dtypes(model, shape), tensor_shapes(shape)
    size = sum(math.prod(size) * dtypes[name].itemsize for name, size in sizes.items()) / 2**20
    # In float32 at most.
    size += sum(4 * math.prod(each) for _, each in further_tensors(model, shape)) / 2**20
    _check_disk(target, size)
    return CheckpointExport(checkpoint, target, model, shape, _read_layout(overrides, shape), size)


def run_export(plan: CheckpointExport) -> None:
    """Export as one rank of the layout; collective."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.export import export_checkpoint

    start = time.monotonic()
    layout = plan.layout
    topology = groups.initialise(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        virtual_stages=layout.virtual,
        stage_layers=layout.stage_layers,
    )
    console = Console(is_main_rank=topology.rank == 0)
    console.echo(f"checkpoint {plan.checkpoint} -> {plan.folder}, {layout}")
    with console.progress("exporting") as progress:
        export_checkpoint(
            plan.checkpoint,
            plan.folder,
            like=plan.like,
            shape=plan.shape,
            topology=topology,
            progress=progress,
        )
    console.echo(
        f"wrote {plan.folder}: {plan.mebibytes:,.1f} MiB in {time.monotonic() - start:.0f} s"
    )


def _find_checkpoint(source: Path, name: str) -> Path | None:
    """Return the checkpoint folder called `name` at or below this path, or None."""
    if is_checkpoint(source):
        return source if source.name == name or source.name not in (FOLDER, CRITIC) else None
    checkpoints = RunDirectory(source).checkpoints
    newest = max(checkpoints.intact_steps(), default=None)
    folder = (source if newest is None else checkpoints.folder(newest)) / name
    return folder if is_checkpoint(folder) else None


def _find_model_folder(checkpoint: Path, like: str | None, *, critic: bool) -> Path:
    """Return the model folder that a checkpoint's weights belong to."""
    if like is not None:
        if not (Path(like) / "config.json").is_file():
            raise ConfigError(f"--like {like} has no config.json; give a Hugging Face folder")
        return Path(like)
    runs = [
        folder for folder in checkpoint.absolute().parents if (folder / "config.yaml").is_file()
    ]
    hint = "give the Hugging Face folder with config and tokenizer by --like"
    if not runs:
        raise ConfigError(f"checkpoint {checkpoint} is not in a run directory; {hint}")
    config = load_config(runs[0] / "config.yaml")
    own = config.critic.path if critic and config.critic is not None else None
    model = Path(own or config.model.path)
    if not (model / "config.json").is_file():
        raise ConfigError(f"{runs[0]} was trained from {model}, which no longer exists; {hint}")
    return model


def _read_layout(overrides: list[str], shape: ModelShape) -> ActorLayout:
    values: dict[str, Any] = {"model": {"path": "."}, "data": {"train": "."}}
    for override in overrides:
        if not override.startswith("parallel."):
            raise ConfigError(
                f"{override}: only parallel.* can be set here, for example parallel.tensor=2"
            )
        apply_override(values, override)
    return export_layout(parse_config(values).parallel, shape)


def export_layout(parallel: ParallelSection, shape: ModelShape) -> ActorLayout:
    """Return the layout of an export; raise ValueError if the model does not fit it."""
    problems = cut_problems(parallel, shape)
    if problems:
        raise ConfigError("\n  ".join(problems))
    # Experts are sharded over tensor * context * data: use as few replicas as that requires.
    shards = parallel.expert * parallel.expert_tensor_size
    replicas = shards // math.gcd(shards, parallel.tensor * parallel.context)
    layout = ActorLayout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        data=parallel.data or replicas,
        virtual=parallel.virtual_stages,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor_size,
        stage_layers=None if parallel.stage_layers is None else tuple(parallel.stage_layers),
    )
    layout.pieces(shape, rank=0)  # raises ValueError for other conflicts
    return layout


def _check_disk(target: Path, needed: float) -> None:
    folder = find_writable(target, key=str(target))
    free = shutil.disk_usage(folder).free / 2**20
    if needed > free:
        raise ConfigError(
            f"{target}: {needed:,.0f} MiB are needed but {folder} has {free:,.0f} MiB free; free "
            "some, or choose another disk"
        )
