"""Offline rollouts: groups from files instead of an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import Config, ConfigError
from megatron_rl.data.prompts import tokenize_messages
from megatron_rl.data.rows import add_system_prompt
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.errors import UserError
from megatron_rl.objectives import build_objective
from megatron_rl.resharding.push import SyncStats
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.rollout_files import NEEDED, check_rollout_files, find_rollout_files
from megatron_rl.rollouts.source import RolloutSource, RunContext
from megatron_rl.runs.rollout_tables import MESSAGES, OBSERVED, count_thinned, read_observed
from megatron_rl.types import GradeResult, Prompt, PromptGroup, PromptSlot, Response, Rollout

LOGPROBS = ("behavior_logprobs", "rollout_logprobs")  # columns in order of preference


@dataclass
class OfflineRollouts:
    """Rollouts in file order, group after group; the same on every rank."""

    config: Config
    rollouts: list[Rollout]
    logprobs: list[np.ndarray | None]  # [N] of each response's tokens, from the file

    @classmethod
    def load(cls, config: Config, echo: Callable[[str], object]) -> OfflineRollouts:
        """Read `offline.rollouts` on one rank and send it to all. Collective."""
        rollouts, logprobs, note = run_on_rank_0(
            lambda: (*read_rollouts(config), describe_thinned(config)),
            doing="reading offline.rollouts",
        )
        groups = len(rollouts) // config.rollout.responses_per_prompt
        passes = config.trainer.steps * config.rollout.prompts_per_step / groups
        echo(
            f"offline: {groups} groups of {config.rollout.responses_per_prompt}, "
            f"{passes:.2g} passes{note}"
        )
        if config.offline.behavior != "file":  # that model computes them instead
            logprobs = [None] * len(rollouts)
        return cls(config, rollouts, logprobs)

    def groups(
        self, slots: Sequence[PromptSlot], start: int, step: int, *, updates: int
    ) -> list[PromptGroup]:
        """Groups for the slots of a step, of which the first is group `start` of the run.

        The first group of the files follows the last one.
        """
        size = self.config.rollout.responses_per_prompt
        count = len(self.rollouts) // size
        places = [(start + slot.group) % count * size + i for slot in slots for i in range(size)]
        groups = build_groups(
            [self.rollouts[place] for place in places],
            slots, config=self.config, step=step, updates=updates,
        )  # fmt: skip
        rows = iter([self.logprobs[place] for place in places])
        return [
            PromptGroup(
                **(vars(group) | {"behavior_logprobs": tuple(next(rows) for _ in range(size))})
            )
            for group in groups
        ]


@dataclass
class OfflineSource(RolloutSource):
    """Fills the slots of the buffer with groups from files, in their order."""

    run: RunContext
    rollouts: OfflineRollouts
    behavior: BehaviorLogprobs

    @property
    def can_resume_inside(self) -> bool:
        return self.behavior.can_resume_inside

    def collect(self, step: int) -> list[RolloutBatch]:
        clock, buffer, updates = self.run.clock, self.run.buffer, self.run.actor.updates
        with clock.phase("rollout"):
            parts = [
                self.rollouts.groups(slots, self._start(slots), step, updates=updates)
                for slots in buffer.missing(step)
            ]
        with clock.phase("pack"):
            fresh = [self.run.pack(groups) for groups in parts]
        with clock.phase("behavior"):
            for batch in fresh:
                self.behavior.freeze(batch)
        check_logprobs(fresh)
        return fresh

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


def read_rollouts(config: Config) -> tuple[list[Rollout], list[np.ndarray | None]]:
    """Read rollouts and log-probs of all files; ConfigError naming an unusable row."""
    assert config.offline.rollouts is not None
    tokenizer = load_tokenizer(config.model.path, template=config.data.template)
    rollouts: list[Rollout] = []
    logprobs: list[np.ndarray | None] = []
    check_rollout_files(Path(config.offline.rollouts))
    for file in find_rollout_files(Path(config.offline.rollouts)):
        rows = _rows(file)
        for number, row in enumerate(rows):
            try:
                rollout, values = _rollout(row, tokenizer, place=len(rollouts), config=config)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"offline.rollouts: {file}, row {number}: {error}") from None
            rollouts.append(rollout)
            logprobs.append(values)
    _check_groups(rollouts, config.rollout.responses_per_prompt)
    if config.offline.behavior == "file" and all(values is None for values in logprobs):
        raise ConfigError(
            f"offline.rollouts: {config.offline.rollouts} has no column {' or '.join(LOGPROBS)}, "
            "and a ratio needs the log-probs of what generated; name that model as offline.behavior"
        )
    _check_engine_logprobs(rollouts, config)
    return rollouts, logprobs


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


def _check_engine_logprobs(rollouts: Sequence[Rollout], config: Config) -> None:
    """Raise ConfigError if engine log-probs are needed and some response has none."""
    objective = build_objective(config.objective.name, **config.objective.overrides)
    needs = {
        "behavior=engine": config.behavior == "engine",
        f"objective.name={config.objective.name}": "rollout_logprobs" in objective.needs,
    }
    missing = sum(not one.response.has_engine_logprobs for one in rollouts)
    for name in (name for name, is_needed in needs.items() if is_needed and missing):
        raise ConfigError(
            f"{name} needs the engine's log-probs, and {missing} responses of offline.rollouts "
            "have none in a column rollout_logprobs; take another"
        )


def _unknown(count: int) -> np.ndarray:
    return np.full(count, np.nan, np.float32)


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"offline.rollouts: {file} cannot be read as parquet: {error}") from None
    return rows


def _rollout(
    row: dict[str, Any], tokenizer: Any, *, place: int, config: Config
) -> tuple[Rollout, np.ndarray | None]:
    """Convert a row to a rollout with log-probs; tokenize texts without token ids."""
    prompt, text, reward = (row[name] for name in NEEDED)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = list(add_system_prompt(tuple(messages), config.data.system_prompt))
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise UserError(f"reward is {reward!r}: it must be a finite number")
    prompt_ids = row.get("prompt_token_ids") or tokenize_messages(
        messages,
        tokenizer,
        template=config.data.template,
        arguments=config.data.template_arguments,
    )
    ending = row.get("finish_reason")
    tokens = row.get("token_ids")
    if tokens is None:
        end = [] if ending == "length" else [tokenizer.eos_token_id]
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
    if not tokens:
        raise UserError("the response has no tokens")
    if len(prompt_ids) + len(tokens) > config.max_model_tokens:
        raise UserError(
            f"prompt and response have {len(prompt_ids) + len(tokens)} tokens, more than "
            f"data.max_prompt_tokens + rollout.max_response_tokens={config.max_model_tokens}; "
            "raise one of them"
        )
    size = len(tokenizer)
    if not 0 <= min((*prompt_ids, *tokens)) <= max((*prompt_ids, *tokens)) < size:
        raise UserError(f"a token lies outside the tokenizer's {size}: were they another model's?")
    observed = read_observed(row)
    sampled = _count_sampled(observed, len(tokens))
    frozen, generated = (_logprobs(row.get(name), name, sampled) for name in LOGPROBS)
    response = Response(
        prompt_index=row.get("prompt_index", place // config.rollout.responses_per_prompt),
        sample_index=place % config.rollout.responses_per_prompt,
        token_ids=np.array(tokens, np.int32),
        rollout_logprobs=_unknown(sampled) if generated is None else generated,
        text=text,
        finish_reason=ending if ending in ("length", "lost") else "stop",
        weight_version=-1,  # versions in files are of another run
        observed=observed,
        messages=tuple(json.loads(row.get(MESSAGES) or "[]")),
    )
    source = Prompt(
        index=response.prompt_index,
        messages=tuple(messages),
        token_ids=tuple(prompt_ids),
        ground_truth=str(row.get("ground_truth", "")),
        data_source=str(row.get("data_source", "offline")),
    )
    grade_result = GradeResult(
        float(reward), row.get("reason") or "", row.get("extracted"),
        rewards=dict(row.get("rewards") or {}),
    )  # fmt: skip
    return Rollout(source, response, grade_result), _behavior(row, frozen, generated)


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


def _count_sampled(observed: Sequence[tuple[int, int]], count: int) -> int:
    """Count the tokens outside the observed ranges; UserError if these are out of order."""
    bounds = [bound for one in observed for bound in one]
    if sorted(bounds) != bounds or (bounds and not 0 < bounds[0] <= bounds[-1] < count):
        raise UserError(
            f"{OBSERVED} is {list(observed)!r:.80} for {count} tokens; its ranges must be in "
            "order, without overlap, and between tokens that the policy sampled"
        )
    return count - sum(end - first for first, end in observed)


def _behavior(
    row: dict[str, Any], frozen: np.ndarray | None, generated: np.ndarray | None
) -> np.ndarray | None:
    """Log-probs of the actor if the file has the column (null: not computed), else the engine's."""
    return frozen if LOGPROBS[0] in row else generated


def _check_groups(rollouts: Sequence[Rollout], size: int) -> None:
    """Raise ConfigError unless each `size` consecutive rows answer the same prompt."""
    if not rollouts or len(rollouts) % size:
        raise ConfigError(
            f"offline.rollouts has {len(rollouts)} rows, no multiple of "
            f"rollout.responses_per_prompt={size}; set that to the size of its groups"
        )
    for start in range(0, len(rollouts), size):
        prompts = {rollout.prompt.token_ids for rollout in rollouts[start : start + size]}
        if len(prompts) > 1:
            raise ConfigError(
                f"offline.rollouts: rows {start} to {start + size - 1} answer {len(prompts)} "
                f"prompts, and rollout.responses_per_prompt={size} consecutive rows are a group; "
                "sort the file by prompt, or set that to the size of its groups"
            )


class NoEngine:
    """Engine of an offline run: ignores weights and generates nothing."""

    engine_seconds: tuple[float, ...] = ()
    weight_version = -1

    def sleep(self) -> None: ...

    def sync_weights(self, actor: Any, *, version: int) -> SyncStats:
        return SyncStats(0.0, 0, 0)
