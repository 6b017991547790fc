"""How many rollout batches ahead of its training a group is generated: one policy, one class.

A policy is a pure function of the run's seed and a slot; `by_length` alone also looks at what is
held, because a group's length is not known before it is generated. A constant lag is one drawn
from a single number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.seeds import derive_seed
from megatron_rl.types import Slot


class LagPolicy(Protocol):
    """When a slot is filled, and in which order what is held is trained."""

    @property
    def most(self) -> int:
        """No group is generated earlier than this many steps before its slot's."""
        ...

    def lag(self, slot: Slot) -> int:
        """Steps between the generation of a slot's group and the slot's step."""
        ...

    def ready(self, slot: Slot, *, generated: int, longest: int) -> int:
        """Groups that are not trained yet are trained in this order, then in that of slots.

        generated: the step whose weights generated the group; longest: its longest response.
        """
        return slot.step


@dataclass(frozen=True)
class UniformLag(LagPolicy):
    """Each group's lag is drawn for itself from low, low + 1, ..., high."""

    low: int
    high: int
    seed: int

    @property
    def most(self) -> int:
        """The largest that can be drawn."""
        return self.high

    def lag(self, slot: Slot) -> int:
        """By the slot's own seed."""
        drawn = derive_seed(self.seed, "lag", slot.step, slot.group)
        return self.low + drawn % (self.high - self.low + 1)


@dataclass(frozen=True)
class LengthLag(LagPolicy):
    """`batches` rollout batches are generated ahead; long groups are overtaken by short ones.

    A group is ready one step later for every `tokens` of its longest response, and what is ready
    first is trained first: the bias of a system that trains on what has finished.
    """

    batches: int
    tokens: int

    @property
    def most(self) -> int:
        """How far ahead groups are generated."""
        return self.batches

    def lag(self, slot: Slot) -> int:
        """All are generated equally far ahead."""
        return self.batches

    def ready(self, slot: Slot, *, generated: int, longest: int) -> int:
        """The step of generation, and one more for every `tokens` tokens."""
        return generated + longest // self.tokens


@dataclass(frozen=True)
class TraceLag(LagPolicy):
    """The lags that another run recorded, step by step and group by group."""

    lags: tuple[tuple[int, ...], ...]  # [steps][new groups of the step]

    @property
    def most(self) -> int:
        """The largest of the trace."""
        return max(max(row) for row in self.lags)

    def lag(self, slot: Slot) -> int:
        """What the trace says."""
        return self.lags[slot.step - 1][slot.group]


def build_policy(value: Any, *, seed: int) -> LagPolicy:
    """The policy of `lag.batches`: a number, or one key with what it needs.

    Raises ValueError that names the key, the rule and the cure.
    """
    if _is_count(value):
        return UniformLag(value, value, seed)
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(
            f"lag.batches={value!r}: give a number of rollout batches from 0, or one of "
            "{uniform: [LOW, HIGH]}, {by_length: {batches: K, tokens: N}}, {trace: FILE}"
        )
    (kind, given), *_ = value.items()
    match kind:
        case "uniform":
            if not (isinstance(given, list) and len(given) == 2 and all(map(_is_count, given))):
                raise ValueError(f"lag.batches.uniform={given!r}: give two numbers, [LOW, HIGH]")
            low, high = given
            if low > high:
                raise ValueError(f"lag.batches.uniform={given!r}: LOW is above HIGH; swap them")
            return UniformLag(low, high, seed)
        case "by_length":
            if not (
                isinstance(given, Mapping)
                and given.keys() == {"batches", "tokens"}
                and all(map(_is_count, given.values()))
                and given["tokens"]
            ):
                raise ValueError(
                    f"lag.batches.by_length={given!r}: give batches, how many are generated ahead, "
                    "and tokens, at least 1, after which a response takes a step longer"
                )
            return LengthLag(given["batches"], given["tokens"])
        case "trace":
            return read_trace(Path(str(given)))
    raise ValueError(f"lag.batches.{kind}: unknown; choose one of uniform, by_length, trace")


def read_trace(file: Path) -> TraceLag:
    """The lags of a schedule.jsonl; ValueError where it is not one.

    One JSON object per step, in order from step 1, with `step` and `lag`, a list of one number per
    group; `replays`, a list as long, marks groups that had been trained before: they are left out.
    `slot`, a list as long, says which lag belongs to which prompt; without it they are in order.
    """
    rows: list[tuple[int, ...]] = []
    try:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            step, lags = row["step"], row["lag"]
            replays = row.get("replays", [0] * len(lags))
            slots = row.get("slot", [[step, place] for place in range(len(lags))])
            trained = sorted(zip(slots, lags, replays, strict=True))
            new = tuple(lag for _, lag, again in trained if not again)
            if step != len(rows) + 1:
                raise ValueError(f"step {step} stands where step {len(rows) + 1} should")
            if not new or not all(_is_count(lag) and lag < step for lag in new):
                raise ValueError(f"step {step} needs lags from 0 to {step - 1}")
            rows.append(new)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"lag.batches.trace: {file} is no record of lags ({error}); name the schedule.jsonl "
            "of a run"
        ) from None
    if not rows:
        raise ValueError(f"lag.batches.trace: {file} is empty; name the schedule.jsonl of a run")
    return TraceLag(tuple(rows))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
