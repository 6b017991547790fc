"""Checks that the command makes before it starts any process of a run, and its number of steps.

These are the checks of settings and layout that each rank repeats, and others too slow for every
rank: first rows of the prompts through tokenizer and template, the reward on a real row, and the
headers of the weights. They do not import torch or vLLM, which would take longer than the checks.
"""

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import Config, ConfigError, parse_config
from megatron_rl.data.prompts import share
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.engine.engine_arguments import cpu_engine_problems
from megatron_rl.models.shape import ModelShape, read_critic_shape, read_model_shape
from megatron_rl.models.stored_tensors import check_headers
from megatron_rl.objectives.spec import needs_reference
from megatron_rl.preflight.settings import evaluation_problems, settings_problems
from megatron_rl.preflight.trials import (
    MESSAGE_SECONDS,
    EnvironmentTrial,
    VerifierTrial,
    start_environment_trial,
    start_trial,
)
from megatron_rl.rollouts.prompt_files import Files, build_order, count_prompts, prompt_problems
from megatron_rl.rollouts.rollout_files import check_rollout_files, have_prompt_tokens
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.processes import has_cuda
from megatron_rl.types import Prompt


def check_run(config: Config, *, world_size: int) -> None:
    """Raise ConfigError listing why this run cannot start here."""
    _raise_if_any("this run cannot start", run_problems(config, world_size=world_size))


def run_problems(config: Config, *, world_size: int, is_local: bool = True) -> list[str]:
    """List why a run cannot start; is_local: whether it uses this machine's devices."""
    problems = _run_problems(config, world_size=world_size, is_local=is_local)
    try:
        RunDirectory.of(config).check_inputs(config)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _run_problems(config: Config, *, world_size: int, is_local: bool) -> list[str]:
    if config.offline.rollouts is not None:  # they contain prompts and rewards
        problems, shape = settings_problems(config, world_size=world_size, is_local=is_local)
        try:
            check_rollout_files(Path(config.offline.rollouts))
            needs_template = not have_prompt_tokens(Path(config.offline.rollouts))
            if not _is_named("model.path", problems):
                options = config.tokenizer_options
                options |= {} if needs_template else {"template": "raw"}
                load_tokenizer(config.model.path, **options)
        except ConfigError as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(f"model.path: {error}")
        return problems + _weight_problems(config, shape, problems)
    if not config.has_engine:  # demonstrations
        problems, shape = settings_problems(config, world_size=world_size, is_local=is_local)
        if shape is not None and not _is_named("model.path", problems):
            files = config.prompt_files
            usable = {key: file for key, file in files.items() if not _is_named(key, problems)}
            problems += prompt_problems(config, shape, usable)[0]
        return problems + _weight_problems(config, shape, problems)
    with (
        start_trial(config) as trial,
        start_environment_trial(config) as environment,
    ):
        problems, shape = settings_problems(config, world_size=world_size, is_local=is_local)
        return problems + _input_problems(
            config,
            shape,
            config.prompt_files,
            trial,
            environment,
            problems,
            is_local=is_local,
        )


def check_evaluation_run(config: Config, files: Files, *, world_size: int) -> None:
    """Raise ConfigError listing why this evaluation cannot start here."""
    with (
        start_trial(config) as trial,
        start_environment_trial(config) as environment,
    ):
        problems, shape = evaluation_problems(config, files, world_size=world_size)
        problems += _input_problems(config, shape, files, trial, environment, problems)
    problems = [re.sub("^model.path: ", "--model: ", problem) for problem in problems]
    _raise_if_any("this evaluation cannot start", problems)


def _raise_if_any(what: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{what}:\n  " + "\n  ".join(problems))


def _input_problems(
    config: Config,
    shape: ModelShape | None,
    files: Files,
    trial: VerifierTrial,
    environment: EnvironmentTrial,
    known: list[str],
    *,
    is_local: bool = True,
) -> list[str]:
    """List problems of the input files that are not in `known`."""
    problems = _weight_problems(config, shape, known)
    usable = {key: file for key, file in files.items() if not _is_named(key, known)}
    prompts: dict[str, Prompt] = {}
    unusable = []
    if not any(problem.startswith("environment.name=") for problem in known):
        unusable = environment.problems()
    if shape is not None:
        if is_local and not has_cuda():
            problems += cpu_engine_problems(
                head_dim=shape.head_dim,
                expert_parallel=config.rollout.expert_parallel,
                latent=shape.sizes["latent"] if shape.latent else None,
                cached_states=shape.delta is not None
                and bool(config.rollout.engine.get("enable_prefix_caching")),
            )
        if not _is_named("model.path", known) and not _is_named("--model", known):
            more, prompts = prompt_problems(environment.with_tools(), shape, usable)
            problems += more
    asked = (one for key, one in prompts.items() if key not in config.conversation_files)
    prompt = next(asked, None)
    problems += unusable or environment.try_on(prompt)
    if not any(problem.startswith("reward.verifier=") for problem in known):
        problems += trial.problems(prompt, keep_best=config.trainer.keep_best)
    return problems


def _is_named(key: str, problems: list[str]) -> bool:
    return any(problem.startswith(f"{key}: ") for problem in problems)


def _weight_problems(config: Config, shape: ModelShape | None, known: list[str]) -> list[str]:
    if shape is None:
        return []
    folders = {"model.path": config.model.path}
    if needs_reference(config.objective.choice.needs):
        folders |= config.given_references
    if config.critic is not None and config.critic.path is not None:
        folders["critic.path"] = config.critic.path
    problems = []
    for key, folder in folders.items():
        if _is_named(key, known):
            continue
        try:
            read = read_critic_shape if key == "critic.path" else read_model_shape
            check_headers(folder, shape if key == "model.path" else read(folder))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return problems


def resolve_epochs(
    config: Config, *, echo: Callable[[str], object] = lambda text: None
) -> tuple[Config, list[str]]:
    """Return the config with the steps of `data.epochs`, and equal overrides for other processes.

    A pass has as many steps as `PromptOrder` makes of it: whole ones, without the prompts left
    over. Resolved again from the same prompts, as for a resumed run, it gives the same steps.
    echo: receives a line with the result. Raises ConfigError if the prompts cannot be counted.
    """
    if (epochs := config.data.epochs) is None:
        return config, []
    files = ", ".join(path for path, _, _ in config.training.values())
    waiting = threading.Timer(
        MESSAGE_SECONDS, echo, (f"counting the prompts of {files} for data.epochs",)
    )
    waiting.daemon = True
    waiting.start()
    try:
        sizes = count_prompts(config)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"data.epochs={epochs:g} needs the number of prompts, but: {error}\n  or give the "
            "length of the run without it, by data.epochs=null and trainer.steps"
        ) from error
    finally:
        waiting.cancel()
    build_order(config, [*sizes.values()])  # raises where there are too few
    fresh = config.fresh_groups
    per_pass = sum(sizes.values()) // fresh
    # The first step has no groups to replay, so its new prompts are those of several later steps.
    steps = max(
        1, round(epochs * per_pass) - math.ceil(config.rollout.prompts_per_step / fresh) + 1
    )
    echo(
        f"data.epochs={epochs:g}: {sum(sizes.values()):,} prompts, {fresh} per step, so {per_pass} "
        f"steps per epoch: trainer.steps={steps}{_describe_mix(config, sizes, steps)}"
    )
    values = config.model_dump()
    values["data"]["epochs"], values["trainer"]["steps"] = None, steps
    return parse_config(values), [f"trainer.steps={steps}", "data.epochs=null"]


def _describe_mix(config: Config, sizes: dict[str, int], steps: int) -> str:
    """Describe how often the run passes over each set of `data.mix`, by their weights."""
    if not config.data.mix:
        return ""
    shares = share(config.fresh_groups, [weight for _, _, weight in config.training.values()])
    passes = [
        f"{key} {steps * part / size:.1f} times"
        for (key, size), part in zip(sizes.items(), shares, strict=True)
    ]
    return f"; by their weights it passes over {', '.join(passes)}"
