"""Offline rollouts: groups from files instead of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from megatron_rl.config import Config, ConfigError
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.distributed.agreement import run_on_rank_0, sync_errors_across_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.resharding.push import SyncStats
from megatron_rl.rollouts.behavior import BehaviorLogprobs
from megatron_rl.rollouts.groups import build_groups
from megatron_rl.rollouts.offline_rows import LOGPROBS, Scored, parse_rollout, share_rollouts
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.rollout_files import check_rollout_files, find_rollout_files, read_rows
from megatron_rl.rollouts.source import RolloutSource, RunContext
from megatron_rl.runs.rollouts import count_thinned
from megatron_rl.types import PromptGroup, PromptSlot, Rollout


@dataclass
class OfflineRollouts:
    """Rollouts in file order, group after group, which are read when they are trained."""

    config: Config
    files: list[Path]
    ends: np.ndarray  # [files] rows in each file and those before it
    tokenizer: Any

    @classmethod
    def open(cls, config: Config) -> OfflineRollouts:
        """Open `offline.rollouts`; reads only the number of rows. ConfigError for bad files."""
        check_rollout_files(Path(str(config.offline.rollouts)))
        files = find_rollout_files(Path(str(config.offline.rollouts)))
        # Rows with token ids need no chat template; `parse_rollout` refuses others without one.
        options = config.tokenizer_options | {"template": "raw"}
        tokenizer = load_tokenizer(config.model.path, **options)
        return cls(
            config, files, np.cumsum([pq.read_metadata(f).num_rows for f in files]), tokenizer
        )

    @classmethod
    def load(cls, config: Config, echo: Callable[[str], object]) -> OfflineRollouts:
        """Open `offline.rollouts` after rank 0 has read and checked every row. Collective."""

        def check() -> str:
            cls.open(config).check()
            return describe_thinned(config)

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

    def read(self, places: Iterable[int]) -> Iterator[Scored]:
        """Yield the rollouts at ascending `places` with their log-probs, a few rows in memory.

        Raises ConfigError naming an unusable row.
        """
        for number, members in itertools.groupby(places, self._file_of):
            file, start = self.files[number], int(self.ends[number - 1]) if number else 0
            for row_number, row in read_rows(file, [place - start for place in members]):
                try:
                    yield parse_rollout(
                        row, self.tokenizer, place=start + row_number, config=self.config
                    )
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
            _check_group([rollout for rollout, _ in group], start)
            has_logprobs |= any(values is not None for _, values in group)
            without_engine += sum(not one.response.has_engine_logprobs for one, _ in group)
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

        The first group of the files follows the last one. Every rank reads a share of the groups,
        which it owns (`types.Response`). Collective.
        """
        size = self.config.rollout.responses_per_prompt
        numbers = [(start + slot.group) % self.count for slot in slots]
        with sync_errors_across_ranks(doing="reading offline.rollouts"):
            own = self._read_share(numbers, topology)
        scored = share_rollouts(own, count=len(slots), topology=topology)
        groups = build_groups(
            [rollout for rollout, _ in scored],
            slots, config=self.config, step=step, updates=updates,
        )  # fmt: skip
        rows = iter([values for _, values in scored])
        return [
            replace(group, behavior_logprobs=tuple(next(rows) for _ in range(size)))
            for group in groups
        ]

    def _read_share(self, numbers: Sequence[int], topology: Topology) -> dict[int, list[Scored]]:
        """Read this rank's share of the groups with these numbers, by their place in the step."""
        places = range(topology.rank, len(numbers), topology.world_size)
        size, distinct = self.config.rollout.responses_per_prompt, {numbers[p] for p in places}
        found = self.read(number * size + i for number in sorted(distinct) for i in range(size))
        if self.config.offline.behavior != "file":  # that model computes the log-probs instead
            found = ((rollout, None) for rollout, _ in found)
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

    def score(self, step: int, generated: list[RolloutBatch]) -> list[RolloutBatch]:
        with self.run.clock.phase("behavior"):
            for batch in generated:
                self.behavior.freeze(batch)
        check_logprobs(generated)
        return generated

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


class NoEngine:
    """Engine of an offline run: ignores weights and generates nothing."""

    engine_seconds: tuple[float, ...] = ()
    weight_version = -1
    shares_devices = True

    def sleep(self) -> None: ...

    def sync_weights(self, actor: Any, *, version: int) -> SyncStats:
        return SyncStats(0.0, 0, 0)
