"""Disk space and device memory that a run needs, checked before any process starts."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.config import Config, ConfigError, dump_config
from megatron_rl.data.rows import count_rows
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import count_adapter_parameters
from megatron_rl.models.safetensors_headers import find_files, read_header
from megatron_rl.models.shape import ModelShape, read_critic_shape, tensor_shapes
from megatron_rl.rollouts.schedule import build_schedule
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.failures import free_files

DOES_NOT_FIT = 3  # the exit status of a dry run of a run that does not fit
# Environment variables of a rank, which would make the dry run act as one.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def host_memory() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(
    config: Config, *, world_size: int, device_bytes: int | None, host_bytes: int | None = None
) -> str | None:
    """Raise ConfigError if the run does not fit; return a warning if the check itself failed.

    device_bytes: memory of one device; None without a device, which skips the check. host_bytes:
    one process's share of its host's memory, if what it pins there is to be compared. The dry run
    uses its own process because it creates the process groups of the whole run.
    """
    if device_bytes is None or not config.run.check_memory:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [
            sys.executable, "-m", "megatron_rl.cli", "dry-run", str(file),
            "--processes", str(world_size), "--fit", str(device_bytes / 2**30),
        ]  # fmt: skip
        if host_bytes is not None:
            command += ["--host", str(host_bytes / 2**30)]
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        completed = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            env=environment,
        )
    output = completed.stderr.strip().rpartition("megatron-rl: error: ")[
        2
    ]  # progress is printed before it
    if completed.returncode == DOES_NOT_FIT:
        raise ConfigError(f"{output}; or skip this check with run.check_memory=false")
    if completed.returncode == 0:
        return None
    last = output.splitlines()[-1] if output else f"it exited with status {completed.returncode}"
    return f"could not check that this run fits on its devices, because the dry run failed: {last}"


# float32 weight, Adam's two moments and the master weight
CHECKPOINT_BYTES_PER_PARAMETER = 16
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of safetensors
_LARGEST = 4  # bytes of a parameter in an export, where its dtype is not known
# Before compression: a token id with two log-probs in rollouts/ and generated/, with one in eval/.
# A response is assumed to have a quarter of the maximum length until the run has written files.
ROLLOUT_BYTES_PER_TOKEN = 12
EVALUATION_BYTES_PER_TOKEN = 8
AVERAGE_LENGTH = 0.25
FEWEST_FILES = 100  # of a checkpoint, the model and some steps


def check_disk(config: Config, run: RunDirectory, shape: ModelShape) -> None:
    """Raise ConfigError if the run directory cannot be written, or the disk is too small for it.

    Space that the run already occupies is reused: the oldest checkpoint is deleted when a new one
    is complete, and files of `generated/` with it.
    """
    folder = find_writable(run.path, key="run.dir")
    needs = disk_needs(config, run, shape)
    needed, free = sum(needs.values()), shutil.disk_usage(folder).free
    if needed > free:
        parts = ", ".join(
            f"{describe_size(size)} for {what}" for what, size in needs.items() if size
        )
        raise ConfigError(
            f"{folder} has {describe_size(free)} free but the run needs {describe_size(needed)} "
            f"more: {parts}; free some, lower trainer.keep_checkpoints, set logging.keep_rollouts, "
            "or set run.dir to another disk"
        )
    if (files := free_files(folder)) is not None and files < FEWEST_FILES:
        raise ConfigError(
            f"the disk of {folder} can take only {files} more files, since its inodes are in use; "
            "delete some files, or set run.dir to another disk"
        )


def disk_needs(config: Config, run: RunDirectory, shape: ModelShape) -> dict[str, float]:
    """Return the bytes that a run will still write and keep, by purpose."""
    parameters = sum(math.prod(size) for size in tensor_shapes(shape).values())
    trainer, step = config.trainer, _step_bytes(config, run)
    keep_every = trainer.steps // trainer.keep_every if trainer.keep_every else 0
    kept = trainer.keep_checkpoints + bool(trainer.keep_best) + keep_every
    existing = _size_of(run.checkpoints.path)
    # one more than kept: the oldest is deleted after the newest is complete
    lora, trained = config.lora, parameters  # a checkpoint contains what is trained
    if lora is not None:
        trained = count_adapter_parameters(shape, rank=lora.rank, targets=lora.targets)
    if config.critic is not None:
        own = shape if config.critic.path is None else read_critic_shape(config.critic.path)
        if (adapters := config.critic.lora) is None:
            trained += sum(math.prod(size) for size in tensor_shapes(own).values())
        else:  # and the value head
            rank, targets = adapters.rank, adapters.targets
            trained += own.hidden_size + count_adapter_parameters(own, rank=rank, targets=targets)
    checkpoint = trained * CHECKPOINT_BYTES_PER_PARAMETER + _stored_batches(config) * step
    generated = 0.0
    if config.lag.partial_rollouts is None:  # kept until the next checkpoint
        steps = min(trainer.checkpoint_every, trainer.steps)
        generated = max(steps * step - _size_of(run.generated.path), 0)
    already = f" ({describe_size(existing)} already written)" if existing else ""
    return {
        f"{kept} + 1 checkpoints{already}": max(checkpoint * (kept + 1) - existing, 0),
        "the model": parameters * export_bytes_per_parameter(Path(config.model.path)),
        "new files in rollouts/": _remaining_rollouts(config, run, step),
        "generated/": generated,
        "new files in eval/": _remaining_evaluations(config, run),
    }


def export_bytes_per_parameter(folder: Path) -> float:
    """Return the bytes of an exported parameter, which has the dtype of the model's files.

    Quantized weights are exported in two bytes. Without files it is the dtype in config.json.
    """
    try:
        files = sorted(set(find_files(folder).values()))
        headers = [each for file in files for each in read_header(folder / file).values()]
        known = [each for each in headers if each["dtype"] in _BYTES]
        if len(known) < len(headers) or not known:
            return 2
        sizes = [math.prod(each["shape"]) for each in known]
        total = sum(_BYTES[each["dtype"]] * n for each, n in zip(known, sizes, strict=True))
        return total / max(sum(sizes), 1)
    except (UserError, OSError):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            named = values.get("dtype") or values.get("torch_dtype")
            return {"bfloat16": 2, "float16": 2}.get(str(named), _LARGEST)
    return _LARGEST


def find_writable(path: Path, *, key: str) -> Path:
    """Return the nearest existing folder above `path`; ConfigError if it is not writable."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{key}: {folder} is not a writable folder; choose another")
    return folder


def describe_size(size: float) -> str:
    """Format bytes for people: 640 bytes, 12.3 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size:.0f} bytes"


def _step_bytes(config: Config, run: RunDirectory) -> float:
    """Estimate the bytes of one step's rollouts, from complete files of the run if it has any."""
    keep = config.logging.keep_rollouts
    files = sorted(run.rollouts.glob("*.parquet"))
    if files and keep != "sampled":
        whole = files if keep == "all" else files[-keep:]
        return sum(file.stat().st_size for file in whole) / len(whole)
    rollout = config.rollout
    tokens = rollout.prompts_per_step * rollout.responses_per_prompt * _longest(config)
    return tokens * AVERAGE_LENGTH * ROLLOUT_BYTES_PER_TOKEN


def _longest(config: Config) -> int:
    """Return the maximum tokens of a response, with the observations of an environment."""
    return config.max_packed_tokens - config.data.max_prompt_tokens


def _remaining_rollouts(config: Config, run: RunDirectory, step: float) -> float:
    """Estimate the bytes still to be written to `rollouts/`; step: bytes of a complete file."""
    keep, rollout = config.logging.keep_rollouts, config.rollout
    groups = -(-config.logging.traced_responses // rollout.responses_per_prompt)
    sampled = min(1.0, 2 * max(groups, 1) / rollout.prompts_per_step)  # fraction of groups

    def after(steps: int) -> float:
        whole = keep if isinstance(keep, int) else {"all": steps, "sampled": 0}[keep]
        return step * (min(steps, whole) + sampled * max(steps - whole, 0))

    existing = len(list(run.rollouts.glob("*.parquet")))
    return max(after(config.trainer.steps) - after(existing), 0)


def _stored_batches(config: Config) -> float:
    """Return the rollout batches in a checkpoint: the current one, queued and replayed ones."""
    schedule = build_schedule(config)
    waiting = schedule.policy.most() + schedule.sync_weights_every - 1
    return 1 + (waiting + schedule.capacity - 1) * schedule.fresh / schedule.groups


def _remaining_evaluations(config: Config, run: RunDirectory) -> float:
    """Estimate the bytes still to be written to `eval/`.

    Sets whose rows cannot be counted quickly, such as those of the hub, count once written.
    """
    steps, every = config.trainer.steps, config.eval.every
    times = 1 + steps // every + bool(steps % every)  # before training, and after the last step
    samples = 1 if config.eval.temperature == 0 else config.eval.samples
    longest = _longest(config)
    total = 0.0
    for name, (path, _) in config.evaluation_files.items():
        files = list(
            run.evaluations.glob(f"{name.removeprefix('eval.sets.')}_{'[0-9]' * 6}.parquet")
        )
        if files:
            size = sum(file.stat().st_size for file in files) / len(files)
        else:
            rows = count_rows(path)  # infinite where counting would be slow: left out
            tokens = (rows if math.isfinite(rows) else 0) * samples * longest * AVERAGE_LENGTH
            size = tokens * EVALUATION_BYTES_PER_TOKEN
        total += max(times - len(files), 0) * size
    return total


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
