"""Plan, checks and execution of `megatron-rl convert`."""

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.actor.checkpoint_contents import FOLDER, check_stored, is_checkpoint
from megatron_rl.actor.weights import check_weights, stored_dtypes
from megatron_rl.config import (
    ConfigError,
    ParallelSection,
    apply_override,
    load_config,
    parse_config,
)
from megatron_rl.conversion.name_table import build_name_table, describe_shares, format_table
from megatron_rl.models.shape import ModelShape, read_model_shape, tensor_shapes
from megatron_rl.models.stored_tensors import stored_shapes
from megatron_rl.preflight.disk import find_writable
from megatron_rl.preflight.layout import cut_problems
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.telemetry.console import Console


@dataclass(frozen=True)
class Conversion:
    """A conversion that has passed every check of its files."""

    source: Path  # a Hugging Face folder, or a folder of distributed-checkpoint files
    target: Path
    like: Path  # provides config, tokenizer files and dtypes; equals a Hugging Face `source`
    to_checkpoint: bool
    shape: ModelShape
    dtypes: dict[str, torch.dtype]
    layout: ActorLayout

    def describe(self) -> str:
        """Describe source, target and layout in one line."""
        kinds = ("Hugging Face folder", "distributed checkpoint")
        kind_from, kind_to = kinds if self.to_checkpoint else kinds[::-1]
        return f"{kind_from} {self.source} -> {kind_to} {self.target}, {self.layout}"


def plan_conversion(
    source: str | Path, target: str | Path, *, like: str | None, overrides: list[str]
) -> Conversion:
    """Determine the conversion of a path and check it, without writing anything.

    Raises ValueError with a hint.
    """
    source, target = Path(source), Path(target)
    checkpoint = _find_checkpoint(source)
    if checkpoint is None and not (source / "config.json").is_file():
        raise ConfigError(
            f"--from {source} is neither a Hugging Face folder (it has no config.json) nor a "
            "checkpoint of a run or of `convert`; give one of these, or a run directory"
        )
    if checkpoint is None and like is not None:
        raise ConfigError(f"--like is for checkpoints; {source} is a Hugging Face folder itself")
    if target.exists():
        raise ConfigError(f"--to {target} exists and is never overwritten; choose another")
    model = source if checkpoint is None else _find_model_folder(checkpoint, like)
    shape = read_model_shape(model)
    if checkpoint is None:
        check_weights(source, shape)
    else:
        check_stored(checkpoint, shape)
    conversion = Conversion(
        source=checkpoint or source,
        target=target,
        like=model,
        to_checkpoint=checkpoint is None,
        shape=shape,
        dtypes=stored_dtypes(model, shape),
        layout=_read_layout(overrides, shape),
    )
    _check_disk(conversion)
    return conversion


def describe_dry_run(conversion: Conversion) -> str:
    """Describe a conversion: its table of names and the elements of each process."""
    shape, layout = conversion.shape, conversion.layout
    table = format_table(build_name_table(shape, layout, conversion.dtypes))
    size = f"{len(stored_shapes(shape))} tensors, {_mebibytes(conversion):,.1f} MiB"
    shares = "\n".join(describe_shares(shape, layout))
    return f"{conversion.describe()}\n\n{table}\n\n{size}\n{shares}\nnothing was written"


def run_conversion(conversion: Conversion) -> None:
    """Convert as one rank of the layout; collective."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.import_export import convert_to_checkpoint, convert_to_hugging_face

    start = time.monotonic()
    layout = conversion.layout
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
    console.echo(conversion.describe())
    with console.progress("converting") as progress:
        if conversion.to_checkpoint:
            convert_to_checkpoint(
                conversion.source, conversion.target, topology=topology, progress=progress
            )
        else:
            convert_to_hugging_face(
                conversion.source,
                conversion.target,
                like=conversion.like,
                topology=topology,
                progress=progress,
            )
    console.echo(
        f"wrote {conversion.target}: {len(conversion.dtypes)} tensors, "
        f"{_mebibytes(conversion):,.1f} MiB in {time.monotonic() - start:.0f} s"
    )


def _find_checkpoint(source: Path) -> Path | None:
    """Return the checkpoint folder at or below this path, or None."""
    for folder in (source, source / FOLDER):
        if is_checkpoint(folder):
            return folder
    checkpoints = RunDirectory(source).checkpoints
    newest = max(checkpoints.intact_steps(), default=None)
    return None if newest is None else checkpoints.folder(newest) / FOLDER


def _find_model_folder(checkpoint: Path, like: str | None) -> Path:
    """Return the model folder that a checkpoint's weights belong to."""
    if like is not None:
        if not (Path(like) / "config.json").is_file():
            raise ConfigError(f"--like {like} has no config.json; give a Hugging Face folder")
        return Path(like)
    if (checkpoint.parent / "config.json").is_file():  # written by `convert`
        return checkpoint.parent
    runs = [
        folder for folder in checkpoint.absolute().parents if (folder / "config.yaml").is_file()
    ]
    hint = "give the Hugging Face folder with config and tokenizer by --like"
    if not runs:
        raise ConfigError(f"checkpoint {checkpoint} is not in a run directory; {hint}")
    model = Path(load_config(runs[0] / "config.yaml").model.path)
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
    return check_layout(parse_config(values).parallel, shape)


def check_layout(parallel: ParallelSection, shape: ModelShape) -> ActorLayout:
    """Return the layout of a conversion; raise ValueError if the model does not fit it."""
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


def _check_disk(conversion: Conversion) -> None:
    folder = find_writable(conversion.target, key="--to")
    needed, free = _mebibytes(conversion), shutil.disk_usage(folder).free / 2**20
    if needed > free:
        raise ConfigError(
            f"--to {conversion.target}: {needed:,.0f} MiB are needed but {folder} has "
            f"{free:,.0f} MiB free; free some, or choose another disk"
        )


def _mebibytes(conversion: Conversion) -> float:
    """Return the size of the weights in the dtypes of the Hugging Face files."""
    sizes, dtypes = tensor_shapes(conversion.shape), conversion.dtypes
    return sum(math.prod(size) * dtypes[name].itemsize for name, size in sizes.items()) / 2**20
