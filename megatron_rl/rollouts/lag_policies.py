"""Lag policies: the number of rollout batches that a group is generated ahead of its training.

A policy is a pure function of the run's seed and a slot. Only `by_length` also depends on the
generated groups, because their lengths are unknown before. A constant lag is a uniform draw from a
single number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptSlot


class LagPolicy(Protocol):
    """Time at which slots are filled, and the order in which new groups are trained."""

    @property
    def most(self) -> int:
        """Maximum lag of any slot."""
        ...

    def lag(self, slot: PromptSlot) -> int:
        """Steps between the generation of a slot's group and the slot's step."""
        ...

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        """Sort key of the groups that are not trained yet; ties in slot order.

        generated: the step whose weights generated the group; longest: its longest response.
        """
        return slot.step


@dataclass(frozen=True)
class UniformLag(LagPolicy):
    """Independent uniform lags of groups from low, low + 1, ..., high."""

    low: int
    high: int
    seed: int

    @property
    def most(self) -> int:
        return self.high

    def lag(self, slot: PromptSlot) -> int:
        drawn = derive_seed(self.seed, "lag", slot.step, slot.group)
        return self.low + drawn % (self.high - self.low + 1)


@dataclass(frozen=True)
class LengthLag(LagPolicy):
    """Constant lag of `batches`, in which short groups overtake long ones.

    A group is ready one step later for every `tokens` of its longest response, and ready groups are
    trained first: the bias of systems that train on the responses that finish first.
    """

    batches: int
    tokens: int

    @property
    def most(self) -> int:
        return self.batches

    def lag(self, slot: PromptSlot) -> int:
        return self.batches

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        return generated + longest // self.tokens


@dataclass(frozen=True)
class TraceLag(LagPolicy):
    """Lags recorded by another run, for each step and group."""

    lags: tuple[tuple[int, ...], ...]  # [steps][new groups of the step]

    @property
    def most(self) -> int:
        return max(max(row) for row in self.lags)

    def lag(self, slot: PromptSlot) -> int:
        return self.lags[slot.step - 1][slot.group]


def build_policy(value: Any, *, seed: int) -> LagPolicy:
    """Build the policy of `lag.batches`: a number, or one key with its settings.

    Raises UserError naming the key and the rule.
    """
    if _is_count(value):
        return UniformLag(value, value, seed)
    if not isinstance(value, Mapping) or len(value) != 1:
        raise UserError(
            f"lag.batches={value!r}: give a number of rollout batches from 0, or one of "
            "{uniform: [LOW, HIGH]}, {by_length: {batches: K, tokens: N}}, {trace: FILE}"
        )
    (kind, given), *_ = value.items()
    match kind:
        case "uniform":
            if not (isinstance(given, list) and len(given) == 2 and all(map(_is_count, given))):
                raise UserError(f"lag.batches.uniform={given!r}: give two numbers, [LOW, HIGH]")
            low, high = given
            if low > high:
                raise UserError(f"lag.batches.uniform={given!r}: LOW is above HIGH; swap them")
            return UniformLag(low, high, seed)
        case "by_length":
            if not (
                isinstance(given, Mapping)
                and given.keys() == {"batches", "tokens"}
                and all(map(_is_count, given.values()))
                and given["tokens"]
            ):
                raise UserError(
                    f"lag.batches.by_length={given!r}: give batches, how many are generated ahead, "
                    "and tokens, at least 1, after which a response takes a step longer"
                )
            return LengthLag(given["batches"], given["tokens"])
        case "trace":
            return read_trace(Path(str(given)))
    raise UserError(f"lag.batches.{kind}: unknown; choose one of uniform, by_length, trace")


def read_trace(file: Path) -> TraceLag:
    """Read the lags of a schedule.jsonl; ValueError if it is none.

    One JSON object per step, in order from step 1, with `step` and `lag`, a list of one number per
    group; `replays`, a list of that length, marks groups trained before, which are left out.
    `slot`, a list of that length, assigns lags to prompts; without it they are in order.
    """
    rows: list[tuple[int, ...]] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            step, lags = row["step"], row["lag"]
            replays = row.get("replays", [0] * len(lags))
            slots = row.get("slot", [[step, place] for place in range(len(lags))])
            trained = sorted(zip(slots, lags, replays, strict=True))
            new = tuple(lag for _, lag, again in trained if not again)
            if step != len(rows) + 1:
                raise UserError(f"step {step} stands where step {len(rows) + 1} should")
            if not new or not all(_is_count(lag) and lag < step for lag in new):
                raise UserError(f"step {step} needs lags from 0 to {step - 1}")
            rows.append(new)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"lag.batches.trace: {file} is no record of lags ({error}); name the schedule.jsonl "
            "of a run"
        ) from None
    if not rows:
        raise UserError(f"lag.batches.trace: {file} is empty; name the schedule.jsonl of a run")
    return TraceLag(tuple(rows))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
