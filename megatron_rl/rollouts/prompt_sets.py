"""Prompts of a run: read and tokenized on one rank, sent to all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.data.mixing import PromptMix, join_sets
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.prompt_files import build_order, read_sets
from megatron_rl.types import Prompt


@dataclass(frozen=True)
class PromptSets:
    """Training prompts with their order, and evaluation prompts by set."""

    training: list[Prompt]
    order: PromptOrder | PromptMix
    evaluation: dict[str, list[Prompt]]


def read_prompt_sets(
    config: Config, shape: ModelShape, *, echo: Callable[[str], object] = print
) -> PromptSets:
    """Read and check every set of the config; ConfigError if one cannot be used.

    echo: prints how many prompts are left out.
    """
    sets = read_sets(config, shape, config.prompt_files, echo=echo)
    if config.offline.rollouts is not None:
        return PromptSets([], PromptOrder(0, seed=config.seed), {})
    parts = [sets.pop(key) for key in config.training]
    order = build_order(config, [len(part) for part in parts])
    training = join_sets(parts) if config.data.mix else parts[0]
    return PromptSets(training, order, _by_name(sets))


def _by_name(sets: Mapping[str, list[Prompt]]) -> dict[str, list[Prompt]]:
    return {key.removeprefix("eval.sets."): prompts for key, prompts in sets.items()}


def share_prompt_sets(
    config: Config, shape: ModelShape, *, echo: Callable[[str], object]
) -> PromptSets:
    """Read prompt sets on rank 0 and send them to every rank. Collective."""
    return run_on_rank_0(
        lambda: read_prompt_sets(config, shape, echo=echo), doing="reading the prompts"
    )


def share_evaluation_sets(
    config: Config, shape: ModelShape, *, echo: Callable[[str], object]
) -> dict[str, list[Prompt]]:
    """Read the evaluation sets alone on rank 0 and send them to every rank. Collective."""
    return run_on_rank_0(
        lambda: _by_name(read_sets(config, shape, config.evaluation_files, echo=echo)),
        doing="reading the prompts",
    )
