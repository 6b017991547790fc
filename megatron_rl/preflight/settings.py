"""Checks of all settings, which take seconds and run before any long work."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.sections import MATH_ANSWER, ColumnsSection, CriticSection, LoraSection
from megatron_rl.data.hub import is_on_hub
from megatron_rl.data.rows import check_prompt_file
from megatron_rl.data.tokenizer import check_same_tokens, require_tokenizer
from megatron_rl.engine.engine_arguments import engine_argument_problems
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import (
    adapters_of_experts,
    check_peft_folder,
    engine_problems,
    target_problems,
)
from megatron_rl.models.shape import ModelShape, read_critic_shape, read_model_shape
from megatron_rl.objectives.spec import FunctionSpec, ObjectiveSpec
from megatron_rl.preflight.hub_names import hub_problem
from megatron_rl.preflight.layout import (
    cut_problems,
    engine_layout_problems,
    layout_problems,
    length_problems,
    product_sizes,
)
from megatron_rl.preflight.resources import check_disk, find_writable
from megatron_rl.rollouts.schedule import build_schedule
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.processes import has_cuda, limit_problem
from megatron_rl.types import ARRAY_NAMES, PromptGroup, Response, TokenBatch

FP8_SIZES = 16  # Transformer Engine's `assert_dim_for_fp8_exec`


def check_settings(config: Config, *, world_size: int) -> ModelShape:
    """Run the quick checks that need no other rank; returns the model's shape.

    Raises ConfigError listing every problem and how to fix it.
    """
    problems, shape = settings_problems(config, world_size=world_size)
    if problems:
        raise ConfigError("this run cannot start:\n  " + "\n  ".join(problems))
    assert shape is not None, "a model without a shape is a problem"
    return shape


def settings_problems(
    config: Config, *, world_size: int, is_local: bool = True
) -> tuple[list[str], ModelShape | None]:
    """List why a run cannot start; also return the model's shape if its config.json was read.

    is_local: whether the run uses this machine's devices.
    """
    problems = [
        *_file_problems(config, config.prompt_files),
        *_logger_problems(config),
        *_code_problems(config),
        *_loss_function_problems(config),
        *engine_argument_problems(config.rollout.engine),
    ]
    shape = _read_model(config.model.path, problems)
    problems += _further_model_problems(config, shape) + _schedule_problems(config)
    if shape is not None:
        problems += layout_problems(config, shape, world_size)
        problems += length_problems(config, shape)
        if is_local:
            problems += _transformer_engine_problems(config, shape)
            problems += [problem] if (problem := limit_problem(world_size)) else []
    try:
        run = RunDirectory.of(config)
        run.check_usable(config)
        find_writable(run.path, key="run.dir")
        if shape is not None and not problems:  # the estimate would fail for the same reasons
            check_disk(config, run, shape)
    except ConfigError as error:
        problems.append(str(error))
    return problems, shape


def check_evaluation(
    config: Config, files: Mapping[str, tuple[str, ColumnsSection]], *, world_size: int
) -> ModelShape:
    """Check a config for evaluation without training, like `check_settings`.

    files: the evaluation sets, by the names that the user gave.
    """
    problems, shape = evaluation_problems(config, files, world_size=world_size)
    if problems:
        raise ConfigError("this evaluation cannot start:\n  " + "\n  ".join(problems))
    assert shape is not None, "a model without a shape is a problem"
    return shape


def evaluation_problems(
    config: Config, files: Mapping[str, tuple[str, ColumnsSection]], *, world_size: int
) -> tuple[list[str], ModelShape | None]:
    """List why an evaluation cannot start; also return the model's shape if it was read."""
    problems = [
        *_file_problems(config, files),
        *_code_problems(config),
        *engine_argument_problems(config.rollout.engine),
    ]
    shape = _read_model(config.model.path, problems, key="--model")
    if shape is not None:
        problems += engine_layout_problems(config, shape, world_size)
        problems += length_problems(config, shape)
    return problems, shape


# Names that an argument of a user's own loss cannot have.
TAKEN = {"policy_logprobs", "divergence", "advantage", "prompt", "verdict", *ARRAY_NAMES}
TAKEN |= {each.name for kind in (Response, TokenBatch, PromptGroup) for each in fields(kind)}


def _loss_function_problems(config: Config) -> list[str]:
    if isinstance(config.objective.choice, FunctionSpec):
        try:
            further = config.objective.choice.further
        except UserError as error:
            return [str(error)]
        if taken := [name for name in further if name in TAKEN]:
            return [
                f"objective.function={config.objective.choice.function} takes {taken[0]}, the name "
                "of a value that megatron_rl itself computes or stores; give the argument and the "
                "column of offline.rollouts another name"
            ]
        if further and config.offline.rollouts is None:
            return [
                f"objective.function={config.objective.choice.function} takes {further[0]}, a "
                "value of each token that vLLM does not return; train on offline.rollouts with a "
                "column of this name, or take the argument out of the function"
            ]
    return []


def _read_model(path: str, problems: list[str], *, key: str = "model.path") -> ModelShape | None:
    """Read the model's shape; return None after adding a problem."""
    if not Path(path).is_dir():
        as_name, name = hub_problem(path), Path(path).name.partition("@")[0]
        hint = (
            "give a local Hugging Face model folder (config.json, *.safetensors, tokenizer files)"
        )
        if as_name is not None:  # models/Qwen2.5-0.5B may be either
            hint = (
                f"{as_name}; for a folder of this name: hf download OWNER/{name} --local-dir {path}"
            )
        problems.append(f"{key}: {Path(path).absolute()} is not a folder; {hint}")
        return None
    try:
        require_tokenizer(path)
    except ValueError as error:
        problems.append(f"{key}: {error}")
    try:
        return read_model_shape(path)
    except ValueError as error:
        problems.append(f"{key}: {error}")
        return None


def _further_model_problems(config: Config, shape: ModelShape | None) -> list[str]:
    problems = []
    if (behavior := config.offline.behavior) != "file":
        problems += _same_shape(behavior, "offline.behavior", "it", config, shape)
    for key, folder in config.given_references.items():
        problems += _reference_problems(key, folder, config, shape)
    if config.critic is not None and config.critic.path is not None:
        problems += _reference_problems(
            "critic.path", config.critic.path, config, shape, role="critic"
        )
    if config.critic is not None and config.critic.lora is not None and shape is not None:
        problems += _critic_adapter_problems(config.critic, config.critic.lora, shape)
    problems += _top_k_problems(config, shape)
    if config.lora is not None and shape is not None:
        problems += target_problems(shape, config.lora.targets)
        if config.lora.push == "adapters":
            problems += engine_problems(shape, rank=config.lora.rank)
    if config.lora is not None and config.lora.path is not None and shape is not None:
        problems += _adapter_problems(config, config.lora, shape)
    experts = shape.experts if shape is not None else None
    untested = (
        shape is not None
        and experts
        and (experts.scoring == "sigmoid" or shape.has_sinks or shape.delta is not None)
    )
    if config.model.routing_replay == "engine" and untested:
        problems.append(
            "model.routing_replay=engine: the engine's routes of gpt-oss, of models that score "
            "experts by sigmoids and of models with gated delta nets are untested; set it to "
            "behavior"
        )
    if config.model.routing_replay != "none" and shape is not None and experts is None:
        problems.append(
            f"model.routing_replay={config.model.routing_replay}: {config.model.path} has no "
            "experts; unset it"
        )
    return problems


def _critic_adapter_problems(
    critic: CriticSection, lora: LoraSection, shape: ModelShape
) -> list[str]:
    try:
        own = shape if critic.path is None else read_critic_shape(critic.path)
    except ValueError:
        return []  # named with critic.path
    return target_problems(own, lora.targets, key="critic.lora")


def _adapter_problems(config: Config, lora: LoraSection, shape: ModelShape) -> list[str]:
    try:
        check_peft_folder(
            str(lora.path), model=config.model.path, shape=shape,
            rank=lora.rank, alpha=lora.alpha, targets=lora.targets,
        )  # fmt: skip
    except ValueError as error:
        return [f"lora.path: {error}"]
    return []


def _same_shape(
    folder: str, key: str, what: str, config: Config, shape: ModelShape | None
) -> list[str]:
    """List why a folder's weights cannot replace the policy's."""
    try:
        if read_model_shape(folder) == shape or shape is None:
            return []
    except ValueError as error:
        return [f"{key}: {error}"]
    return [
        f"{key}: {folder} differs in shape from {config.model.path}; {what} must be the same "
        "model with other weights"
    ]


def _top_k_problems(config: Config, shape: ModelShape | None) -> list[str]:
    spec = config.objective.choice
    kl = spec.kl if isinstance(spec, ObjectiveSpec) else None
    rollout = config.rollout
    # With top_p or min_p it bounds the ids that are recorded.
    alone = rollout.top_k if rollout.top_p == 1 and rollout.min_p == 0 else None
    sizes = {"objective.kl.top_k": kl.top_k if kl else None, "rollout.top_k": alone}
    return [
        f"{key}={size}: {config.model.path} has a vocabulary of {shape.vocab_size} tokens, so that "
        "none would be left; give less, or unset it for all tokens"
        for key, size in sizes.items()
        if shape is not None and size is not None and size >= shape.vocab_size
    ]


def _reference_problems(
    key: str, folder: str, config: Config, shape: ModelShape | None, *, role: str = "reference"
) -> list[str]:
    """List why a model cannot be the reference; of another shape, it has the same vocabulary.

    role: reference, or critic, for which the same holds.
    """
    try:
        other = read_critic_shape(folder) if role == "critic" else read_model_shape(folder)
    except ValueError as error:
        return [f"{key}: {error}"]
    has_tokens = (Path(folder) / "tokenizer.json").is_file()
    if shape is not None and role == "critic":  # its head is its own
        shape = replace(shape, head=other.head, tied_embeddings=other.tied_embeddings)
    if shape is None or (other == shape and not has_tokens):  # weights alone
        return []
    if other.vocab_size != shape.vocab_size:
        return [
            f"{key}: {folder} has a vocabulary of {other.vocab_size} tokens, but "
            f"{config.model.path} one of {shape.vocab_size}; a {role} must have the same "
            "tokens: give a model of the same family, with the same vocab_size in its config.json"
        ]
    try:
        check_same_tokens(config.model.path, folder)
    except ValueError as error:
        return [f"{key}: {error}"]
    if other == shape:
        return []
    problems = [*cut_problems(config.parallel, other), *length_problems(config, other)]
    if config.model.fp8:
        problems.append(
            f"model.fp8={config.model.fp8} has not been tried with a {role} of another shape "
            "than the policy; unset model.fp8"
        )
    return [f"{key}: {folder}: {problem}" for problem in problems]


def _schedule_problems(config: Config) -> list[str]:
    try:
        build_schedule(config)
    except ValueError as error:
        return [str(error)]
    return []


def _transformer_engine_problems(config: Config, shape: ModelShape) -> list[str]:
    """List why Transformer Engine, or fp8 with it, cannot be used."""
    model, keys = config.model, []
    if model.transformer_engine:
        keys.append("model.transformer_engine=true")
    if model.fp8:
        keys.append(f"model.fp8={model.fp8}")
    if not keys:
        return []
    needs = {
        "a CUDA device, but there is none": not has_cuda(),
        "Transformer Engine, which is not installed (see megatron-rl doctor)": (
            importlib.util.find_spec("transformer_engine") is None
        ),
        "bfloat16, but trainer.dtype is float32": config.trainer.dtype == "float32",
        "Transformer Engine, but model.transformer_engine is false": (
            model.transformer_engine is False
        ),
    }
    keys_text = " and ".join(keys)
    problems = [
        f"{keys_text}: needs {what}; or unset it"
        for what, is_missing in needs.items()
        if is_missing
    ]
    if model.fp8:
        problems += [
            f"model.fp8={model.fp8}: a rank's {name} is {size}; matrix products in fp8 need "
            f"multiples of {FP8_SIZES}: lower parallel.tensor, or unset model.fp8"
            for name, size in product_sizes(config.parallel, shape).items()
            if size % FP8_SIZES
        ]
    if model.fp8 == "blockwise" and shape.experts is not None:
        problems.append(
            "model.fp8=blockwise: blocks of 128 tokens share a scale, but Megatron pads the tokens "
            "of an expert to a multiple of 16; use model.fp8=tensorwise for a mixture of experts"
        )
    adapted = adapters_of_experts(shape, config.lora.targets if config.lora else ())
    if (local_only := shape.traits.local_only or adapted) is not None:
        problems.append(
            f"{keys_text}: the model has {local_only}, which Transformer Engine's "
            f"layers lack; unset {keys_text}"
        )
    elif shape.sliding_window is not None and config.parallel.context > 1:
        problems.append(
            f"{keys_text}: Transformer Engine's ring of keys and values does not support the "
            f"model's sliding window of {shape.sliding_window} tokens, and parallel.context is "
            f"{config.parallel.context}; set parallel.context to 1, or unset {keys_text}"
        )
    return problems


def _file_problems(config: Config, files: Mapping[str, tuple[str, ColumnsSection]]) -> list[str]:
    """List why prompts cannot be read, from columns and first rows, before any rank starts."""
    problems = []
    for key, (path, columns) in files.items():
        if not (is_on_hub(path) or Path(path).exists()):
            problems.append(
                f"{key}: {Path(path).absolute()} does not exist; give a .parquet, .jsonl or .csv "
                "file (relative paths start at the folder of the command)"
            )
            continue
        try:
            check_prompt_file(
                path,
                columns,
                bad_rows=config.data.bad_rows,
                system_prompt=config.data.system_prompt,
                conversations=key in config.conversation_files,
                setting="data.columns"
                if key == "data.train"
                else f"{key.replace('--data ', 'eval.sets.')}.columns",
            )
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return problems


def _code_problems(config: Config) -> list[str]:
    problems = []
    for key, name in ({"reward.verifier": MATH_ANSWER} | config.code).items():
        match key:
            case "reward.verifier":
                problems += _module_problems(key, name, example="my_rewards:score")
            case "environment.name":
                problems += _module_problems(key, name, form="class", example="my_agent:Game")
            case "lag.policy":
                problems += _module_problems(key, name, form="class", example="my_lags:Mine")
    return problems


def _module_problems(key: str, name: str, *, example: str, form: str = "function") -> list[str]:
    """List why workers would not find `module:function`, without importing it."""
    module, _, function = name.partition(":")
    if not (module and function.isidentifier()):
        return [f"{key}={name}: write module:{form}, for example {example}"]
    if "/" in module or module.endswith(".py"):
        plain = ".".join(Path(module.removesuffix(".py")).parts)
        return [
            f"{key}={name}: write the module without .py and with dots between folders: "
            f"{plain}:{function}"
        ]
    package = module.split(".")[0]
    # Workers also search the folder in which the command is started.
    if not (importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
        return [
            f"{key}={name}: there is no module {package} here or on the Python path; "
            "start in the folder of its file, or install it"
        ]
    return []


def _logger_problems(config: Config) -> list[str]:
    logging = config.logging
    enabled = {
        "tensorboard": logging.tensorboard,
        "wandb": logging.wandb is not None,
        "mlflow": logging.mlflow is not None,
        "trackio": logging.trackio is not None,
    }
    return [
        f"logging.{name} is set but {name} is not installed; pip install {name}, or unset it"
        for name, is_enabled in enabled.items()
        if is_enabled and importlib.util.find_spec(name) is None
    ]
