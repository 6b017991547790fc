"""Checks before any long work: every impossible setting is refused here, in seconds."""

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.data_sections import ColumnsSection
from megatron_rl.data.hub import is_on_hub
from megatron_rl.data.prompts import find_tokenizer
from megatron_rl.data.rows import Columns, check_prompt_file
from megatron_rl.lag.build import build_schedule
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.preflight.disk import check_disk
from megatron_rl.preflight.layout import layout_problems, length_problems, product_sizes
from megatron_rl.rollout.engine_arguments import engine_argument_problems
from megatron_rl.runs.directory import RunDirectory

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FP8_SIZES = 16  # Transformer Engine's `assert_dim_for_fp8_exec`


def check_settings(config: Config, *, world_size: int) -> ModelShape:
    """All checks that need no device; returns the model's shape.

    Raises ConfigError that lists every problem with its cure.
    """
    problems = [
        *_file_problems(config, config.prompt_files),
        *_logger_problems(config),
        *_verifier_problems(config.reward.verifier),
        *engine_argument_problems(config.rollout.engine),
    ]
    shape = _read_model(config.model.path, problems)
    problems += _further_model_problems(config, shape) + _schedule_problems(config)
    if shape is not None:
        problems += layout_problems(config, shape, world_size)
        problems += length_problems(config, shape)
        problems += _transformer_engine_problems(config, shape)
    try:
        run = RunDirectory.of(config)
        run.check_usable(config)
        if shape is not None:
            check_disk(config, run, shape)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("this run cannot start:\n  " + "\n  ".join(problems))
    assert shape is not None, "a model without a shape is a problem"
    return shape


def check_evaluation(
    config: Config, files: Mapping[str, tuple[str, ColumnsSection]], *, world_size: int
) -> ModelShape:
    """The checks of a config that is to evaluate and not to train; as `check_settings`.

    files: its sets, by what the user calls them.
    """
    problems = [
        *_file_problems(config, files),
        *_verifier_problems(config.reward.verifier),
        *engine_argument_problems(config.rollout.engine),
    ]
    shape = _read_model(config.model.path, problems, key="--model")
    if shape is not None:
        problems += layout_problems(config, shape, world_size)
        problems += length_problems(config, shape)
    if problems:
        raise ConfigError("this evaluation cannot start:\n  " + "\n  ".join(problems))
    assert shape is not None, "a model without a shape is a problem"
    return shape


def _read_model(path: str, problems: list[str], *, key: str = "model.path") -> ModelShape | None:
    """The model's shape; None where a problem is added."""
    if not Path(path).is_dir():
        problems.append(f"{key}: {path} is not a folder; {_how_to_get(path, key)}")
        return None
    try:
        find_tokenizer(path)
    except ValueError as error:
        problems.append(f"{key}: {error}")
    try:
        return read_model_shape(path)
    except ValueError as error:
        problems.append(f"{key}: {error}")
        return None


def _how_to_get(path: str, key: str) -> str:
    """The cure where a model's folder is missing."""
    if HUB_NAME.fullmatch(path):
        name = path.split("/")[1]
        return (
            f"if it is a model of the Hugging Face hub, download it first: hf download {path} "
            f"--local-dir models/{name}, then give {key}=models/{name}"
        )
    return "give a local Hugging Face model folder (config.json, *.safetensors, tokenizer files)"


def _further_model_problems(config: Config, shape: ModelShape | None) -> list[str]:
    problems = []
    if (behavior := config.offline.behavior) != "file":
        problems += _same_shape(behavior, "offline.behavior", "it", config, shape)
    if (reference := config.model.reference) is not None:
        problems += _same_shape(reference, "model.reference", "a reference", config, shape)
    return problems


def _same_shape(
    folder: str, key: str, what: str, config: Config, shape: ModelShape | None
) -> list[str]:
    """Why a folder's weights cannot stand in for the policy's."""
    try:
        if read_model_shape(folder) == shape or shape is None:
            return []
    except ValueError as error:
        return [f"{key}: {error}"]
    return [
        f"{key}: {folder} is of another shape than {config.model.path}; {what} must be the same "
        "model with other weights"
    ]


def _schedule_problems(config: Config) -> list[str]:
    try:
        build_schedule(config)
    except ValueError as error:
        return [str(error)]
    return []


def _transformer_engine_problems(config: Config, shape: ModelShape) -> list[str]:
    """Why Transformer Engine, or fp8 with it, cannot be used as asked."""
    model, keys = config.model, []
    if model.transformer_engine:
        keys.append("model.transformer_engine=true")
    if model.fp8:
        keys.append(f"model.fp8={model.fp8}")
    if not keys:
        return []
    needs = {
        "a CUDA device, and there is none": not torch.cuda.is_available(),
        "Transformer Engine, which is not installed (see megatron-rl doctor)": (
            importlib.util.find_spec("transformer_engine") is None
        ),
        "bfloat16, and trainer.dtype is float32": config.trainer.dtype == "float32",
        "Transformer Engine, and model.transformer_engine is false": (
            model.transformer_engine is False
        ),
    }
    asked = " and ".join(keys)
    problems = [f"{asked}: needs {what}; or unset it" for what, lacks in needs.items() if lacks]
    if model.fp8:
        problems += [
            f"model.fp8={model.fp8}: a rank's {name} is {size}; matrix products in fp8 need "
            f"multiples of {FP8_SIZES}: lower parallel.tensor, or unset model.fp8"
            for name, size in product_sizes(config.parallel, shape).items()
            if size % FP8_SIZES
        ]
    return problems


def _file_problems(config: Config, files: Mapping[str, tuple[str, ColumnsSection]]) -> list[str]:
    """Why prompts cannot be read: columns and first rows, before any rank imports anything."""
    problems = []
    for key, (path, columns) in files.items():
        if not (is_on_hub(path) or Path(path).exists()):
            problems.append(f"{key}: {path} does not exist; give a .parquet or .jsonl file")
            continue
        try:
            check_prompt_file(path, Columns(**columns.model_dump()), bad_rows=config.data.bad_rows)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return problems


def _verifier_problems(name: str) -> list[str]:
    """Why workers will not find the verifier; only they import it, whatever it needs."""
    module, _, function = name.partition(":")
    if not (module and function.isidentifier()):
        return [f"reward.verifier={name}: name it as module:function"]
    package = module.split(".")[0]
    # Workers look in the folder that the command is started in, too.
    if not (importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
        return [
            f"reward.verifier={name}: there is no module {package} here or on the Python path; "
            "start where its file lies, or install it"
        ]
    return []


def _logger_problems(config: Config) -> list[str]:
    wanted = {"tensorboard": config.logging.tensorboard, "wandb": config.logging.wandb is not None}
    return [
        f"logging.{name} is set but {name} is not installed; pip install {name}, or unset it"
        for name, used in wanted.items()
        if used and importlib.util.find_spec(name) is None
    ]
