"""Reading of prompts: all of them on rank 0, only the first rows in a command."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, ConfigError
from megatron_rl.config.sections import MATH_ANSWER, ColumnsSection
from megatron_rl.data.demonstrations import ConversationTokenizer
from megatron_rl.data.prompts import (
    PromptMix,
    PromptOrder,
    read_distinct_rows,
    read_prompts,
    write_prompts,
)
from megatron_rl.data.rows import FIRST_ROWS, count_rows, name_row
from megatron_rl.data.tokenizer import (
    describe_other_reader,
    describe_outside,
    describe_raw,
    load_tokenizer,
)
from megatron_rl.engine.stopping import find_stop_rule
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.types import Prompt

Files = Mapping[str, tuple[str, ColumnsSection]]  # sets of prompts, by what the user calls them


def read_sets(
    config: Config,
    shape: ModelShape,
    files: Files,
    *,
    folder: Path,
    echo: Callable[[str], object] = lambda text: None,
) -> dict[str, Path]:
    """Write every prompt of the sets to files in `folder`; ConfigError if one cannot be used.

    Return the file of a `PromptTable` for each set. echo: prints how many prompts are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not files:  # offline: the rollouts contain their prompts
        return {}
    try:
        tokenizer = load_tokenizer(config.model.path, **config.tokenizer_options)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error
    if config.data.template == "raw" and (note := describe_raw(tokenizer, config.model.path)):
        echo(note)
    if (note := describe_other_reader(config.model.path)) is not None:
        echo(note)
    # New names: another node may still see an older file of this name, or its size.
    tables = {key: folder / f"{uuid.uuid4()}.arrow" for key in files}
    sources: set[str] = set()
    for key, file in files.items():
        read = _read_set(config, shape, tokenizer, key, file, echo=echo, sources=sources)
        if not config.environment and key not in config.conversation_files:
            read = _ask_truths(read, config.reward.verifier or MATH_ANSWER, file[0], echo=echo)
        write_prompts(tables[key], read)
    if set(config.training) <= set(files):
        _check_teachers(config, sources)
    return tables


def _ask_truths(
    prompts: Iterator[Prompt], verifier: str, path: str, *, echo: Callable[[str], object]
) -> Iterator[Prompt]:
    """Yield prompts; print how many of the first ground truths no answer can equal.

    Of the verifiers of this package for mathematics; others have formats of their own.
    """
    module, _, _ = MATH_ANSWER.partition(":")
    asked, wrong = 0, []
    for prompt in prompts:
        if verifier.startswith(f"{module}:") and asked < FIRST_ROWS:
            from megatron_rl.rewards.math_answer import can_be_right  # its parser takes a second

            asked += 1
            if not (prompt.ground_truth.isdigit() or can_be_right(prompt.ground_truth)):
                wrong.append(prompt)
        yield prompt
    if wrong:
        echo(
            f"{path}: {len(wrong)} of the first {asked} ground truths are read as no answer, so at "
            f"most the same text is right; the first: {wrong[0].ground_truth!r:.80} "
            f"({name_row(Path(path), wrong[0].index)})"
        )


def _check_teachers(config: Config, sources: set[str]) -> None:
    """Raise ConfigError for a teacher of a data source that no training prompt has."""
    for source in filter(None, config.model.references):
        if source not in sources:
            raise ConfigError(
                f"model.reference.{source}: no training prompt has this data_source; they have "
                f"{', '.join(sorted(sources))}: correct the name, or remove it"
            )


def count_prompts(config: Config) -> dict[str, int]:
    """Count the prompts of each training set of a run. Raises ConfigError for an unreadable set.

    Tokenizes them only if `data.too_long` or `data.bad_rows` leaves some out.
    """
    data, sizes = config.data, {}
    shape = tokenizer = None
    if "skip" in (data.too_long, data.bad_rows):
        try:
            shape = read_model_shape(config.model.path)
            tokenizer = load_tokenizer(config.model.path, **config.tokenizer_options)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
    for key, (path, columns, _) in config.training.items():
        if shape is not None:
            read: Iterator[object] = _read_set(config, shape, tokenizer, key, (path, columns))
        else:
            read = read_distinct_rows(
                Path(path), columns,
                bad_rows=data.bad_rows, system_prompt=data.system_prompt,
                conversations=key in config.conversation_files,
            )  # fmt: skip
        try:
            sizes[key] = sum(1 for _ in read)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    return sizes


def build_order(config: Config, sizes: Sequence[int]) -> PromptOrder | PromptMix:
    """Build the order of the training prompts. Raises ConfigError if a set is too small."""
    order: PromptOrder | PromptMix = PromptOrder(sizes[0], seed=config.seed)
    if config.data.mix:
        weights = tuple(weight for _, _, weight in config.training.values())
        order = PromptMix(tuple(sizes), weights, seed=config.seed)
    try:
        for count in {config.rollout.prompts_per_step, config.fresh_groups}:  # of step 1, and later
            order.indices(0, count)  # raises where there are too few
    except ValueError as error:
        raise ConfigError(f"{'data.mix' if config.data.mix else 'data.train'}: {error}") from error
    return order


def prompt_problems(
    config: Config, shape: ModelShape, files: Files
) -> tuple[list[str], dict[str, Prompt]]:
    """Problems of the first rows of the sets, and the first usable prompt.

    A rank may still find a bad row after the rows that are read here.
    """
    try:
        tokenizer = load_tokenizer(config.model.path, **config.tokenizer_options)
        find_stop_rule(
            config.model.path, tokenizer, vocab_size=shape.vocab_size,
            token_ids=config.rollout.stop_token_ids,
        )  # fmt: skip
    except ValueError as error:
        return [f"model.path: {error}"], {}
    problems: list[str] = []
    first, sizes = {}, {}
    sources: set[str] = set()
    is_whole = set(config.training) <= set(files)  # all training prompts are read
    notes: list[str] = []  # on rows that are left out, which explain why a set is small
    for key, file in files.items():
        try:
            read = _read_set(
                config, shape, tokenizer, key, file,
                first=FIRST_ROWS, echo=notes.append, sources=sources,
            )  # fmt: skip
            prompts = list(read)
        except ConfigError as error:
            if str(error) not in problems:  # a tokenizer of another model is one for all sets
                problems.append(str(error))
            is_whole = False
            continue
        if prompts:
            first[key] = prompts[0]
        rest = max(count_rows(file[0]) - FIRST_ROWS, 0)  # each of which may be a prompt
        is_whole = is_whole and not (key in config.training and rest)
        # no more than a step needs: the whole order takes a moment
        sizes[key] = int(
            min(len(prompts) + rest, max(len(prompts), config.rollout.prompts_per_step))
        )
    if is_whole:
        try:
            _check_teachers(config, sources)
        except ConfigError as error:
            problems.append(str(error))
    training = [sizes[key] for key in config.training if key in sizes]
    if training and len(training) == len(config.training) and set(config.training) <= set(files):
        try:
            build_order(config, training)
        except ConfigError as error:
            left_out = [note for note in notes if "left out" in note]
            problems.append("\n    ".join([str(error), *left_out]))
    return problems, first


def _conversations(config: Config, shape: ModelShape, tokenizer: Any) -> ConversationTokenizer:
    """Build what reads the conversations of `sft`."""
    assert config.sft is not None, "only `sft` has conversations"
    stop = find_stop_rule(
        config.model.path, tokenizer, vocab_size=shape.vocab_size,
        token_ids=config.rollout.stop_token_ids,
    )  # fmt: skip
    return ConversationTokenizer(
        tokenizer,
        turns=config.sft.turns,
        stop=stop.token_ids,
        template=config.data.template,
        arguments=config.data.rendering,
    )


def _read_set(
    config: Config,
    shape: ModelShape,
    tokenizer: Any,
    key: str,
    file: tuple[str, ColumnsSection],
    *,
    first: int | None = None,
    echo: Callable[[str], object] = lambda text: None,
    sources: set[str] | None = None,
) -> Iterator[Prompt]:
    """Yield a set's prompts; sources: receives the data sources of training prompts."""
    path, columns = file
    teachers = list(filter(None, config.model.references)) if key in config.training else []
    data, highest = config.data, 0
    conversations, limit = None, data.max_prompt_tokens
    try:
        if key in config.conversation_files:
            limit = config.max_model_tokens
            conversations = _conversations(config, shape, tokenizer)
        for prompt in read_prompts(
            path,
            tokenizer,
            max_prompt_tokens=limit,
            columns=columns,
            too_long=data.too_long,
            bad_rows=data.bad_rows,
            template=data.template,
            template_arguments=data.rendering,
            system_prompt=data.system_prompt,
            first=first,
            conversations=conversations,
            echo=echo,
        ):
            given = prompt.demonstration.token_ids if prompt.demonstration else ()
            highest = max(highest, *prompt.token_ids, *given)
            if teachers and prompt.data_source not in teachers:
                place = name_row(Path(path), prompt.index)
                raise ConfigError(
                    f"{place}: data_source {prompt.data_source!r} has no "
                    f"teacher in model.reference, which has {', '.join(teachers)}; add one under "
                    "this name"
                )
            if teachers and sources is not None:
                sources.add(prompt.data_source)
            yield prompt
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if highest >= shape.vocab_size:
        folder, size = config.model.path, shape.vocab_size
        raise ConfigError(
            f"model.path: {describe_outside(tokenizer, folder=folder, vocab_size=size)}"
        )
