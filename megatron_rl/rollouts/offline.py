"""Offline rollouts: groups from the rows of files instead of an engine."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from megatron_rl.columns import ARRAYS
from megatron_rl.config import Config, ConfigError
from megatron_rl.data.rendering import tokenize_messages
from megatron_rl.data.rows import add_system_column, add_system_prompt, parse_answer
from megatron_rl.data.token_rows import share_responses
from megatron_rl.data.tokenizer import check_tokenizer, load_tokenizer
from megatron_rl.distributed.agreement import (
    gather_from_ranks,
    run_on_rank_0,
    sync_errors_across_ranks,
)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.fields import changes_training, is_media
from megatron_rl.messages import TOOLS, Message, parse_messages, parse_tools
from megatron_rl.objectives import build_objective
from megatron_rl.objectives.spec import FunctionSpec
from megatron_rl.resharding.push import SyncStats
from megatron_rl.rewards.worker import LARGEST_REWARD, as_number
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.rollout_files import (
    READ,
    WRITTEN,
    check_rollout_files,
    describe_unread,
    find_rollout_files,
    read_rows,
)
from megatron_rl.rollouts.source import RolloutSource, RunContext, StepInput
from megatron_rl.runs.rollouts import (
    MASKS,
    MESSAGES,
    OBSERVED,
    RESTARTS,
    TURN_REWARDS,
    count_thinned,
    read_observed,
    read_restarts,
)
from megatron_rl.types import (
    FinishReason,
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Response,
    Rollout,
    sampled_ranges,
)


@dataclass
class OfflineRollouts:
    """Rollouts in file order, group after group, which are read when they are trained."""

    config: Config
    files: list[Path]
    ends: np.ndarray  # [files] rows in each file and those before it
    tokenizer: Any
    further: tuple[str, ...] = ()  # values of each token that the objective takes besides

    @classmethod
    def open(cls, config: Config) -> OfflineRollouts:
        """Open `offline.rollouts`; reads only the number of rows. ConfigError for bad files."""
        check_rollout_files(Path(str(config.offline.rollouts)))
        files = find_rollout_files(Path(str(config.offline.rollouts)))
        # Rows with token ids need no chat template; `parse_rollout` refuses others without one.
        options = config.tokenizer_options | {"template": "raw"}
        tokenizer = load_tokenizer(config.model.path, **options)
        choice = config.objective.choice
        further = choice.further if isinstance(choice, FunctionSpec) else ()
        rows = [pq.read_metadata(file).num_rows for file in files]
        return cls(config, files, np.cumsum(rows), tokenizer, further)

    @classmethod
    def load(cls, config: Config, echo: Callable[[str], object]) -> OfflineRollouts:
        """Open `offline.rollouts` after rank 0 has read and checked every row. Collective."""

        def check() -> str:
            rollouts = cls.open(config)
            rollouts.check()
            path = Path(str(config.offline.rollouts))
            unread = describe_unread(path, further=rollouts.further)
            return describe_thinned(config) + unread + describe_unused(config)

        note = run_on_rank_0(check, doing="reading offline.rollouts")
        with sync_errors_across_ranks(doing="opening offline.rollouts"):
            rollouts = cls.open(config)
        groups = rollouts.count
        passes = config.trainer.steps * config.rollout.prompts_per_step / groups
        echo(
            f"offline: {groups} groups of {config.rollout.responses_per_prompt}, "
            f"{passes:.2g} passes{note}"
        )
        return rollouts

    @property
    def count(self) -> int:
        """Number of groups."""
        return int(self.ends[-1]) // self.config.rollout.responses_per_prompt

    def read(self, places: Iterable[int]) -> Iterator[Rollout]:
        """Yield the rollouts at ascending `places`, a few rows in memory.

        Raises ConfigError naming an unusable row.
        """
        for number, members in itertools.groupby(places, self._file_of):
            file, start = self.files[number], int(self.ends[number - 1]) if number else 0
            for row_number, row in read_rows(file, [place - start for place in members]):
                try:
                    yield parse_rollout(
                        row, self.tokenizer, place=start + row_number, config=self.config,
                        further=self.further,
                    )  # fmt: skip
                except (ValueError, TypeError, KeyError) as error:
                    message = f"offline.rollouts: {file}, row {row_number}: {error}"
                    raise ConfigError(message) from None

    def _file_of(self, place: int) -> int:
        return int(np.searchsorted(self.ends, place, side="right"))

    def check(self) -> None:
        """Read every row; raise ConfigError if one, or all together, cannot be trained."""
        size, rows = self.config.rollout.responses_per_prompt, int(self.ends[-1])
        if not rows or rows % size:
            raise ConfigError(
                f"offline.rollouts has {rows} rows, no multiple of "
                f"rollout.responses_per_prompt={size}; set that to the size of its groups"
            )
        has_logprobs, without_engine = False, 0
        members = self.read(range(rows))
        for start in range(0, rows, size):
            group = list(itertools.islice(members, size))
            _check_group(group, start)
            has_logprobs |= any(one.response.behavior_logprobs is not None for one in group)
            without_engine += sum(not one.response.has_engine_logprobs for one in group)
        if self.config.offline.behavior == "file" and not has_logprobs:
            raise ConfigError(
                f"offline.rollouts: {self.config.offline.rollouts} has no column "
                f"{' or '.join(LOGPROBS)}, and a ratio needs the log-probs of what generated; name "
                "that model as offline.behavior"
            )
        _check_engine_logprobs(without_engine, self.config)

    def groups(
        self,
        slots: Sequence[PromptSlot],
        start: int,
        step: int,
        *,
        updates: int,
        topology: Topology,
    ) -> list[PromptGroup]:
        """Groups for the slots of a step, of which the first is group `start` of the run.

        The first group of the files follows the last group. Every rank reads a share of the groups,
        which it owns (`types.Response`). Collective.
        """
        numbers = [(start + slot.group) % self.count for slot in slots]
        with sync_errors_across_ranks(doing="reading offline.rollouts"):
            own = self._read_share(numbers, topology)
        rollouts = share_rollouts(own, size=self.config.rollout.responses_per_prompt)
        return build_groups(rollouts, slots, config=self.config, step=step, updates=updates)

    def _read_share(self, numbers: Sequence[int], topology: Topology) -> dict[int, list[Rollout]]:
        """Read this rank's share of the groups with these numbers, by their place in the step."""
        places = range(topology.rank, len(numbers), topology.world_size)
        size, distinct = self.config.rollout.responses_per_prompt, {numbers[p] for p in places}
        found = self.read(number * size + i for number in sorted(distinct) for i in range(size))
        if self.config.offline.behavior != "file":  # that model computes the log-probs instead
            found = (
                replace(one, response=replace(one.response, behavior_logprobs=None))
                for one in found
            )
        by_number = {number: list(itertools.islice(found, size)) for number in sorted(distinct)}
        return {place: by_number[numbers[place]] for place in places}


@dataclass
class OfflineSource(RolloutSource):
    """Fills the slots of the buffer with groups from files, in their order."""

    run: RunContext
    rollouts: OfflineRollouts
    behavior: BehaviorLogprobs

    @property
    def can_resume_inside(self) -> bool:
        return self.behavior.can_resume_inside

    def generate(self, step: int) -> list[RolloutBatch]:
        clock, buffer, updates = self.run.clock, self.run.buffer, self.run.actor.updates
        with clock.phase("rollout"):
            parts = [
                self.rollouts.groups(
                    slots,
                    self._start(slots),
                    step,
                    updates=updates,
                    topology=self.run.actor.topology,
                )
                for slots in buffer.missing(step)
            ]
        with clock.phase("pack"):
            return [self.run.pack(groups) for groups in parts]

    def score(self, step: int, generated: list[RolloutBatch]) -> StepInput:
        with self.run.clock.phase("behavior"):
            batches = [self.behavior.score(batch) for batch in generated]
        check_logprobs(batches)
        return StepInput(batches)

    def _start(self, slots: Sequence[PromptSlot]) -> int:
        """Position in the run of the first group of a step's slots."""
        block, count = self.run.buffer.schedule.prompts(slots[0].step)
        return block * count


def check_logprobs(batches: Sequence[RolloutBatch]) -> None:
    """Raise ConfigError if responses that are to be trained have no behavior log-probs."""
    lacking = sum(
        used and row is None
        for batch in batches
        for row, used in zip(batch.behavior_logprobs, batch.computed, strict=True)
    )
    if lacking:
        raise ConfigError(
            f"offline.rollouts has no log-probs of {lacking} responses that are to be trained: "
            "the run that wrote them did not compute those of advantage 0. Take its settings "
            "of advantage, shaping and objective, or name its model as offline.behavior"
        )


# Settings that are read where an engine generates and a verifier grades.
UNUSED = (
    *(f"data.{name}" for name in ("train", "mix", "columns", "too_long", "bad_rows")),
    *(f"reward.{name}" for name in ("verifier", "on_error", "batch_size")),
    *(f"rollout.{name}" for name in ("stop", "stop_token_ids", "max_num_seqs", "engine")),
    "workers.variables",
    "lora.push",
)


def describe_unused(config: Config) -> str:
    """Name given settings of prompts, rewards and responses, which the files already have."""
    names = config.given(*UNUSED)
    if not names:
        return ""
    return f"; no effect: {', '.join(names)} (rewards and responses come from the files)"


def describe_thinned(config: Config) -> str:
    """Note on groups that `logging.keep_rollouts` removed from the files, or an empty string."""
    files = find_rollout_files(Path(str(config.offline.rollouts)))
    thinned = count_thinned(files)
    if not thinned:
        return ""
    return (
        f"; {thinned} of {len(files)} files have only a sample of the groups that were trained: "
        "logging.keep_rollouts of their run removed the others"
    )


def _check_engine_logprobs(missing: int, config: Config) -> None:
    """Raise ConfigError if engine log-probs are needed and some response has none."""
    objective = build_objective(config.objective.name, **config.objective.overrides)
    needs = {
        "behavior=engine": config.behavior == "engine",
        f"objective.name={config.objective.name}": "rollout_logprobs" in objective.needs,
    }
    for name in (name for name, is_needed in needs.items() if is_needed and missing):
        raise ConfigError(
            f"{name} needs the engine's log-probs, and {missing} responses of offline.rollouts "
            "have none in a column rollout_logprobs; take another"
        )


def _check_group(rollouts: Sequence[Rollout], start: int) -> None:
    """Raise ConfigError unless the rows from `start` answer the same prompt."""
    prompts = {rollout.prompt.token_ids for rollout in rollouts}
    if len(prompts) > 1:
        size = len(rollouts)
        raise ConfigError(
            f"offline.rollouts: rows {start} to {start + size - 1} answer {len(prompts)} "
            f"prompts, and rollout.responses_per_prompt={size} consecutive rows are a group; "
            "sort the file by prompt, or set that to the size of its groups"
        )
    if len(indices := {rollout.response.prompt_index for rollout in rollouts}) > 1:
        raise ConfigError(
            f"offline.rollouts: rows {start} to {start + len(rollouts) - 1} answer one prompt and "
            f"have prompt_index {', '.join(map(str, sorted(indices)))}; give them one, or drop "
            "that column"
        )


class NoEngine:
    """The `WeightSink` of a run without engines: it ignores weights."""

    weight_version = -1
    shares_devices = True

    def sleep(self) -> None: ...

    def sync_weights(self, actor: Any, *, version: int) -> SyncStats:
        return SyncStats(0.0, 0, 0)


# Columns of log-probs in order of preference: the trainer's first
LOGPROBS = tuple(
    column.name
    for by in ("trainer", "engine")
    for column in ARRAYS
    if column.from_files and column.by == by and column.name.endswith("_logprobs")
)


def share_rollouts(own: Mapping[int, Sequence[Rollout]], *, size: int) -> list[Rollout]:
    """Return the groups that all ranks have read, in order; collective.

    own: this rank's groups of `size` by place; it owns their rollouts (`types.Response`). Rank 0
    receives their arrays and texts, and the other ranks everything else.
    """
    mine = {place * size + i: one for place, group in own.items() for i, one in enumerate(group)}
    light = {place: (one.prompt, one.grade_result) for place, one in mine.items()}
    known = {place: one for each in gather_from_ranks(light) for place, one in each.items()}
    shared = share_responses({place: one.response for place, one in mine.items()})
    return [
        Rollout(known[place][0], response, known[place][1]) for place, response in shared.items()
    ]


def parse_rollout(
    row: dict[str, Any],
    tokenizer: Any,
    *,
    place: int,
    config: Config,
    further: Sequence[str] = (),
) -> Rollout:
    """Convert a row to a rollout; tokenize texts without token ids."""
    source = _parse_prompt(row, tokenizer, config=config)
    prompt_ids, text, reward = source.token_ids, row["response"], row["reward"]
    if not isinstance(text, str):
        raise UserError(f"response must be a text, got {text!r:.80}")
    if not isinstance(reward, int | float) or as_number(reward) is None:
        raise UserError(
            f"reward is {reward!r}: it must be a finite number, between {-LARGEST_REWARD:g} and "
            f"{LARGEST_REWARD:g}"
        )
    _refuse_without_effect(row, further)
    ending = _read_ending(row.get("finish_reason"))
    tokens = row.get("token_ids")
    if tokens is None:
        end = [] if ending == "length" else [tokenizer.eos_token_id]
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
    if not tokens:
        raise UserError("the response has no tokens")
    if wrong := [one for one in (*prompt_ids, *tokens) if type(one) is not int]:
        raise UserError(f"token_ids and prompt_token_ids must be whole numbers, got {wrong[0]!r}")
    observed, restarts = read_observed(row), read_restarts(row)
    sampled = _count_sampled(observed, len(tokens))
    _check_restarts(restarts, observed)
    _check_lengths([-len(prompt_ids), *restarts, len(tokens)], limit=config.max_model_tokens)
    size = len(tokenizer)
    if not 0 <= min((*prompt_ids, *tokens)) <= max((*prompt_ids, *tokens)) < size:
        raise UserError(f"a token lies outside the tokenizer's {size}: were they another model's?")
    frozen, generated = (_logprobs(row.get(name), name, sampled) for name in LOGPROBS)
    others = {name: _further(row.get(name), name, sampled) for name in further}
    response = Response(
        prompt_index=_index(row.get("prompt_index"), place // config.rollout.responses_per_prompt),
        sample_index=place % config.rollout.responses_per_prompt,
        token_ids=np.array(tokens, np.int32),
        rollout_logprobs=np.full(sampled, np.nan, np.float32) if generated is None else generated,
        **_parse_masks(row, tokens, observed),
        text=text,
        finish_reason=ending,
        weight_version=-1,  # versions in files are of another run
        observed=observed,
        restarts=restarts,
        messages=tuple(json.loads(row.get(MESSAGES) or "[]")),
        # the actor's if the file has the column (null: not computed), else the engine's
        behavior_logprobs=frozen if LOGPROBS[0] in row else generated,
        further=others,
    )
    source = replace(source, index=response.prompt_index)
    return Rollout(source, response, _read_grade(row, response.turns))


def _read_grade(row: Mapping[str, Any], turns: int) -> GradeResult:
    """Return the grade of a row; where turns have rewards, their exact sum."""
    reward = float(row["reward"])
    of_turns = _turn_rewards(row.get(TURN_REWARDS) or [], turns, reward)
    return GradeResult(
        math.fsum(of_turns) if of_turns else reward,
        row.get("reason") or "",
        row.get("extracted"),
        rewards=_named_rewards(row.get("rewards")),
        turn_rewards=of_turns,
    )


def _parse_prompt(row: dict[str, Any], tokenizer: Any, *, config: Config) -> Prompt:
    """Convert the prompt of a row, with index 0; tokenize it unless the row has its tokens."""
    value, tools = row["prompt"], parse_tools(row.get(TOOLS), from_table=True)
    token_ids = row.get("prompt_token_ids")
    messages: tuple[Message, ...] = ({"role": "user", "content": value},)
    # A file of a run has only the text of the last message, next to the tokens of all.
    if not (token_ids and isinstance(value, str)):
        messages = parse_messages(value, key="prompt", from_table=True)
    if not token_ids:
        messages = add_system_column(messages, row)
    messages = add_system_prompt(messages, config.data.system_prompt)
    if not token_ids:
        check_tokenizer(tokenizer, name=config.model.path, template=config.data.template)
        token_ids = tokenize_messages(
            messages,
            tokenizer,
            template=config.data.template,
            arguments=config.data.rendering,
            tools=tools,
        )
    return Prompt(
        index=0,
        messages=messages,
        token_ids=tuple(token_ids),
        ground_truth=_parse_truth(row.get("ground_truth")),
        data_source="offline" if row.get("data_source") is None else str(row["data_source"]),
        text=tokenizer.decode(token_ids, skip_special_tokens=False),
        tools=tools,
    )


# Words for the end of a response: of this project, OpenAI, vLLM, Anthropic and transformers.
_ENDINGS: dict[str, FinishReason] = {
    "stop": "stop", "eos": "stop", "tool_calls": "stop", "function_call": "stop",
    "end_turn": "stop", "stop_sequence": "stop", "tool_use": "stop", "length": "length",
    "max_tokens": "length", "max_length": "length", "truncated": "length", "lost": "lost",
}  # fmt: skip


def _read_ending(value: Any) -> FinishReason:
    """Return how a response ended; null is one that ended by itself."""
    ending = _ENDINGS.get(str(value or "stop").lower())
    if ending is None:
        raise UserError(
            f"finish_reason is {value!r:.40}; it must be one of {', '.join(_ENDINGS)}, or null for "
            "a response that ended by itself"
        )
    return ending


def _refuse_without_effect(row: Mapping[str, Any], further: Sequence[str]) -> None:
    """Raise UserError for a column that asks for something else than is trained."""
    for name, value in row.items():
        if name in READ or name in WRITTEN or name in further:
            continue
        if is_media(name, value):
            raise UserError(f"has a value in the column {name}; models here read text only")
        if changes_training(name, value, is_column=True):
            raise UserError(
                f"has {name}={value!r:.40}, which would have no effect: every response is trained "
                "by its reward; leave such rows out, or remove the column"
            )


def _index(value: Any, default: int) -> int:
    """Return the index of a prompt, by default that of its group."""
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise UserError(f"prompt_index must be a whole number from 0 on, got {value!r:.40}")
    return value


def _named_rewards(value: Any) -> dict[str, float]:
    """Return the rewards of a response by name, which are only recorded."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"rewards must be a struct of numbers by name, got {value!r:.60}")
    return {name: one for name, one in value.items() if one is not None}


def _parse_truth(value: Any) -> str:
    """Return the ground truth as text; nothing grades again, so that it may be missing."""
    truth = "" if value is None or value == "" else parse_answer(value)
    if truth is None:
        raise UserError(f"ground_truth must be a text or a number, got {value!r:.80}")
    return truth


def _logprobs(values: Any, name: str, count: int) -> np.ndarray | None:
    if values is None:
        return None
    array = np.array(values, np.float32)
    if array.shape != (count,) or not np.isfinite(array).all() or (array > 1e-4).any():
        raise UserError(
            f"{name} has {len(values)} numbers for {count} sampled tokens; it needs a finite one, "
            "not above 0, for each (with token_ids, if texts were cut into other tokens; with "
            f"{OBSERVED}, if an environment wrote some of them)"
        )
    return array


def _further(values: Any, name: str, count: int) -> np.ndarray:
    """Return a value of each token that the objective takes; UserError unless there is one each."""
    array = np.array(() if values is None else values, np.float32)
    if array.shape != (count,) or not np.isfinite(array).all():
        raise UserError(
            f"{name} has {array.size} numbers for {count} sampled tokens; objective.function takes "
            "a finite one for each: add the column, or take the argument out of the function"
        )
    return array


def _turn_rewards(rewards: Sequence[float], turns: int, total: float) -> list[float]:
    """Return the rewards of turns; raises UserError unless they sum to the reward, a float32."""
    if len(rewards) not in (0, turns) or None in map(as_number, rewards):
        raise UserError(
            f"{TURN_REWARDS} is {list(rewards)!r:.80} for {turns} turns; it needs a number "
            f"of at most {LARGEST_REWARD:g} for each, or none"
        )
    size = math.fsum(map(abs, [*rewards, total]))  # rewards of another tool may be float32, too
    if rewards and abs(math.fsum(rewards) - total) > 1e-6 * size:
        raise UserError(
            f"{TURN_REWARDS} sum to {math.fsum(rewards):g}, but reward is {total:g}: it must be "
            "their sum; correct one, or leave out the rewards of turns"
        )
    return list(rewards)


def _check_restarts(restarts: Sequence[int], observed: Sequence[tuple[int, int]]) -> None:
    """Raise UserError unless restarts are in order and each begins an observation with tokens."""
    begins = {first for first, end in observed if end > first}
    if sorted(set(restarts)) != list(restarts) or not begins.issuperset(restarts):
        raise UserError(
            f"{RESTARTS} is {list(restarts)!r:.80}; each must begin an observation, in order"
        )


def _check_lengths(bounds: Sequence[int], *, limit: int) -> None:
    """Raise UserError if the sequence between two bounds is too long for the model."""
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    if longest > limit:
        raise UserError(
            f"prompt and response have {longest} tokens, more than "
            f"data.max_prompt_tokens + rollout.max_response_tokens={limit}; raise one of them"
        )


def _parse_masks(
    row: dict[str, Any], tokens: Sequence[int], observed: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the sampling masks of a row as fields of a response; empty without them."""
    ids, counts = (np.array(row.get(name) or (), np.int32) for name in MASKS)
    if not len(counts):
        return {}
    own = [token for first, end in sampled_ranges(observed, len(tokens))
           for token in tokens[first:end]]  # fmt: skip
    is_whole = len(counts) == len(own) and counts.min() > 0 and counts.sum() == len(ids)
    if not is_whole or (ids == np.repeat(own, counts)).sum() != len(own):
        raise UserError(
            f"{MASKS[1]} has {len(counts)} values that sum to {counts.sum()}, for {len(own)} "
            f"sampled tokens and {len(ids)} ids of {MASKS[0]}: there must be one for each, at "
            "least 1, and each token must be among its ids"
        )
    return dict(zip(MASKS, (ids, counts), strict=True))


def _count_sampled(observed: Sequence[tuple[int, int]], count: int) -> int:
    """Count the tokens outside the observed ranges; UserError if these are out of order."""
    bounds = [bound for one in observed for bound in one]
    if sorted(bounds) != bounds or (bounds and not 0 < bounds[0] <= bounds[-1] < count):
        raise UserError(
            f"{OBSERVED} is {list(observed)!r:.80} for {count} tokens; its ranges must be in "
            "order, without overlap, and between tokens that the policy sampled"
        )
    return count - sum(end - first for first, end in observed)
