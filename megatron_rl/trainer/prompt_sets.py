"""The prompts of a run: read and tokenized by one rank, the same on all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.data_sections import ColumnsSection
from megatron_rl.data.mixing import PromptMix, join_sets
from megatron_rl.data.prompts import PromptOrder, load_prompts, load_tokenizer
from megatron_rl.data.rows import Columns
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollout.requests import check_prompts
from megatron_rl.types import Prompt


@dataclass(frozen=True)
class PromptSets:
    """What is trained on, in its order, and what is evaluated."""

    training: list[Prompt]
    order: PromptOrder | PromptMix
    evaluation: dict[str, list[Prompt]]


def read_prompt_sets(
    config: Config, shape: ModelShape, *, say: Callable[[str], object] = print
) -> PromptSets:
    """Every set of the config, checked; ConfigError where one cannot be used.

    say: is told how many prompts are left out.
    """
    sets = _read(config, shape, config.prompt_files, say)
    if config.offline.rollouts is not None:
        return PromptSets([], PromptOrder(0, seed=config.seed), {})
    parts = [sets.pop(key) for key in config.training]
    training = parts[0]
    order: PromptOrder | PromptMix = PromptOrder(len(training), seed=config.seed)
    if config.data.mix:
        training = join_sets(parts)
        weights = tuple(weight for _, _, weight in config.training.values())
        order = PromptMix(tuple(map(len, parts)), weights, seed=config.seed)
    try:
        order.indices(0, config.rollout.prompts)  # says so if there are too few
    except ValueError as error:
        raise ConfigError(f"{'data.mix' if config.data.mix else 'data.train'}: {error}") from error
    return PromptSets(training, order, _by_name(sets))


def _read(
    config: Config,
    shape: ModelShape,
    files: Mapping[str, tuple[str, ColumnsSection]],
    say: Callable[[str], object],
) -> dict[str, list[Prompt]]:
    try:
        tokenizer = load_tokenizer(config.model.path)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error
    sets = {}
    for key, (path, columns) in files.items():
        try:
            sets[key] = load_prompts(
                path,
                tokenizer,
                max_prompt_tokens=config.data.max_prompt_tokens,
                columns=Columns(**columns.model_dump()),
                too_long=config.data.too_long,
                bad_rows=config.data.bad_rows,
                template_arguments=config.data.template_arguments,
                say=say,
            )
            check_prompts(
                sets[key], vocab_size=shape.vocab_size, longest=config.data.max_prompt_tokens
            )
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    return sets


def _by_name(sets: Mapping[str, list[Prompt]]) -> dict[str, list[Prompt]]:
    return {key.removeprefix("eval.sets."): prompts for key, prompts in sets.items()}


def share_prompt_sets(
    config: Config, shape: ModelShape, *, say: Callable[[str], object]
) -> PromptSets:
    """`read_prompt_sets` by rank 0, for every rank: a file may be large. Collective."""
    return run_on_rank_0(
        lambda: read_prompt_sets(config, shape, say=say), doing="reading the prompts"
    )


def share_evaluation_sets(
    config: Config, shape: ModelShape, *, say: Callable[[str], object]
) -> dict[str, list[Prompt]]:
    """The sets of held-out evaluation alone, by their names; as `share_prompt_sets`."""
    return run_on_rank_0(
        lambda: _by_name(_read(config, shape, config.evaluation_files, say)),
        doing="reading the prompts",
    )
