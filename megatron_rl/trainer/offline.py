"""Rollouts that were generated elsewhere, as the groups that a step trains; no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.config import Config, ConfigError
from megatron_rl.data.prompts import load_tokenizer, tokenize_messages
from megatron_rl.distributed.agreement import run_on_rank_0
from megatron_rl.objectives import build_objective
from megatron_rl.resharding.push import SyncStats
from megatron_rl.trainer.rollout_batch import RolloutBatch, build_groups
from megatron_rl.types import Group, Prompt, Response, Rollout, Slot, Verdict

NEEDED = ("prompt", "response", "reward")
LOGPROBS = ("behavior_logprobs", "rollout_logprobs")  # whichever a file has, the first first


@dataclass
class OfflineRollouts:
    """Rollouts in the order of their files, group after group; the same on every rank."""

    config: Config
    rollouts: list[Rollout]
    logprobs: list[np.ndarray | None]  # [N] of each response's tokens, from the file
    scorer: ReferencePolicy | None = None  # a model that gives them instead

    @classmethod
    def of(
        cls, config: Config, actor: MegatronActor, say: Callable[[str], object]
    ) -> OfflineRollouts | None:
        """What `offline` names, read by one rank; None where it names nothing. Collective."""
        if config.offline.rollouts is None:
            return None
        rollouts, logprobs = run_on_rank_0(
            lambda: read_rollouts(config), doing="reading offline.rollouts"
        )
        groups = len(rollouts) // config.rollout.responses_per_prompt
        passes = config.trainer.steps * config.rollout.prompts / groups
        say(
            f"offline: {groups} groups of {config.rollout.responses_per_prompt}, "
            f"passed through {passes:.2g} times"
        )
        scorer = None
        if config.offline.behavior != "file":
            scorer, logprobs = (
                ReferencePolicy(actor, config.offline.behavior),
                [None] * len(rollouts),
            )
        return cls(config, rollouts, logprobs, scorer)

    def groups(self, slots: Sequence[Slot], start: int, step: int, *, updates: int) -> list[Group]:
        """The groups of a step's slots, whose first one would be group `start` of the run.

        After the last group of the files comes the first one again.
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
            Group(**(vars(group) | {"behavior_logprobs": tuple(next(rows) for _ in range(size))}))
            for group in groups
        ]

    def checked(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch; ConfigError if it is to be trained and the files lack its log-probs."""
        lacking = sum(
            used and row is None
            for row, used in zip(batch.behavior_logprobs, batch.computed, strict=True)
        )
        if self.scorer is None and lacking:
            raise ConfigError(
                f"offline.rollouts has no log-probs of {lacking} responses that are to be trained: "
                "the run that wrote them did not compute those of advantage 0. Take its settings "
                "of advantage, shaping and objective, or name its model as offline.behavior"
            )
        return batch


def read_rollouts(config: Config) -> tuple[list[Rollout], list[np.ndarray | None]]:
    """Rollouts and log-probs of all files; ConfigError naming the row that cannot be used."""
    assert config.offline.rollouts is not None
    tokenizer = load_tokenizer(config.model.path)
    rollouts: list[Rollout] = []
    logprobs: list[np.ndarray | None] = []
    for file in _files(Path(config.offline.rollouts)):
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


def _check_engine_logprobs(rollouts: Sequence[Rollout], config: Config) -> None:
    """ConfigError where log-probs of an engine are asked for and some response has none."""
    objective = build_objective(config.objective.name, **config.objective.overrides)
    asks = {
        "behavior=engine": config.behavior == "engine",
        f"objective.name={config.objective.name}": "rollout_logprobs" in objective.needs,
    }
    lacking = sum(not one.response.has_engine_logprobs for one in rollouts)
    for what in (name for name, needs in asks.items() if needs and lacking):
        raise ConfigError(
            f"{what} needs the engine's log-probs, and {lacking} responses of offline.rollouts "
            "have none in a column rollout_logprobs; take another"
        )


def _unknown(count: int) -> np.ndarray:
    return np.full(count, np.nan, np.float32)


def _files(path: Path) -> list[Path]:
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"offline.rollouts: {path} holds no parquet file; name a run directory, its rollouts/, "
            "or a .parquet file"
        )
    return files


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"offline.rollouts: {file} cannot be read as parquet: {error}") from None
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise ConfigError(
            f"offline.rollouts: {file} has no column {', '.join(missing)}; it needs "
            f"{', '.join(NEEDED)} and has {', '.join(table.column_names)}"
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _rollout(
    row: dict[str, Any], tokenizer: Any, *, place: int, config: Config
) -> tuple[Rollout, np.ndarray | None]:
    """One row as a rollout with its log-probs; texts are tokenized where no tokens are given."""
    prompt, text, reward = (row[name] for name in NEEDED)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"reward is {reward!r}: it must be a finite number")
    prompt_ids = row.get("prompt_token_ids") or tokenize_messages(
        messages, tokenizer, arguments=config.data.template_arguments
    )
    cut = row.get("finish_reason") == "length"
    tokens = row.get("token_ids")
    if tokens is None:
        ending = [] if cut else [tokenizer.eos_token_id]
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], *ending]
    if not tokens:
        raise ValueError("the response has no tokens")
    if len(prompt_ids) + len(tokens) > config.max_model_tokens:
        raise ValueError(
            f"prompt and response have {len(prompt_ids) + len(tokens)} tokens, more than "
            f"data.max_prompt_tokens + rollout.max_response_tokens={config.max_model_tokens}; "
            "raise one of them"
        )
    size = len(tokenizer)
    if not 0 <= min((*prompt_ids, *tokens)) <= max((*prompt_ids, *tokens)) < size:
        raise ValueError(f"a token lies outside the tokenizer's {size}: were they another model's?")
    frozen, generated = (_logprobs(row.get(name), name, len(tokens)) for name in LOGPROBS)
    response = Response(
        prompt_index=row.get("prompt_index", place // config.rollout.responses_per_prompt),
        sample_index=place % config.rollout.responses_per_prompt,
        token_ids=np.array(tokens, np.int32),
        rollout_logprobs=_unknown(len(tokens)) if generated is None else generated,
        text=text,
        finish_reason="length" if cut else "stop",
        weight_version=-1,  # what a file says is a version of another run
    )
    source = Prompt(
        index=response.prompt_index,
        messages=tuple(messages),
        token_ids=tuple(prompt_ids),
        ground_truth=str(row.get("ground_truth", "")),
        data_source=str(row.get("data_source", "offline")),
    )
    verdict = Verdict(float(reward), row.get("reason") or "", row.get("extracted"))
    return Rollout(source, response, verdict), _behavior(row, frozen, generated)


def _logprobs(values: Any, name: str, count: int) -> np.ndarray | None:
    if values is None:
        return None
    array = np.array(values, np.float32)
    if array.shape != (count,) or not np.isfinite(array).all() or (array > 1e-4).any():
        raise ValueError(
            f"{name} has {len(values)} numbers for {count} response tokens; it needs a finite one, "
            "not above 0, for each (with token_ids, if texts were cut into other tokens)"
        )
    return array


def _behavior(
    row: dict[str, Any], frozen: np.ndarray | None, generated: np.ndarray | None
) -> np.ndarray | None:
    """The actor's log-probs where the file has that column, null where it computed none."""
    return frozen if LOGPROBS[0] in row else generated


def _check_groups(rollouts: Sequence[Rollout], size: int) -> None:
    """ConfigError unless every `size` rows in a row answer the same prompt."""
    if not rollouts or len(rollouts) % size:
        raise ConfigError(
            f"offline.rollouts has {len(rollouts)} rows, no multiple of "
            f"rollout.responses_per_prompt={size}; set that to the size of its groups"
        )
    for start in range(0, len(rollouts), size):
        asked = {rollout.prompt.token_ids for rollout in rollouts[start : start + size]}
        if len(asked) > 1:
            raise ConfigError(
                f"offline.rollouts: rows {start} to {start + size - 1} answer {len(asked)} "
                f"prompts, and rollout.responses_per_prompt={size} rows in a row are a group; sort "
                "the file by prompt, or set that to the size of its groups"
            )


class NoEngine:
    """Stands where an engine would: takes weights without a word, and generates nothing."""

    engine_seconds: tuple[float, ...] = ()
    weight_version = -1

    def sleep(self) -> None:
        """Nothing to put to sleep."""

    def push_weights(self, actor: Any, *, version: int) -> SyncStats:
        """Nobody needs them."""
        return SyncStats(0.0, 0, 0)
