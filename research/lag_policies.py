"""Lag policies that studies use, by `lag.policy: research.lag_policies:CLASS`."""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptSlot


@dataclass(frozen=True, kw_only=True)
class UniformLag:
    """Independent uniform lags of groups from low, low + 1, ..., high."""

    seed: int
    steps: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low={self.low}, high={self.high}: give 0 <= low <= high")

    def most(self) -> int:
        return self.high

    def lag(self, slot: PromptSlot) -> int:
        drawn = derive_seed(self.seed, "lag", slot.step, slot.group)
        return self.low + drawn % (self.high - self.low + 1)

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        return slot.step


@dataclass(frozen=True, kw_only=True)
class LengthLag:
    """Constant lag of `batches`, in which short groups overtake long ones.

    A group is ready one step later for every `tokens` of its longest response, and ready groups are
    trained first: the bias of systems that train on the responses that finish first.
    """

    seed: int
    steps: int
    batches: int
    tokens: int

    def __post_init__(self) -> None:
        if self.batches < 0 or self.tokens < 1:
            raise ValueError(f"batches={self.batches}, tokens={self.tokens}: from 0 and from 1")

    def most(self) -> int:
        return self.batches

    def lag(self, slot: PromptSlot) -> int:
        return self.batches

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        return generated + longest // self.tokens


class TraceLag:
    """Lags recorded by another run in its schedule.jsonl, for each step and group.

    `replays` of a step marks groups trained before, which are left out; `slot` assigns lags to
    prompts. Raises ValueError if the file is no such record or is shorter than the run.
    """

    def __init__(self, *, seed: int, steps: int, file: str) -> None:
        self.lags: list[list[int]] = []  # [steps][new groups of the step]
        try:
            for line in Path(file).read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                trained = sorted(zip(row["slot"], row["lag"], row["replays"], strict=True))
                self.lags.append([lag for _, lag, again in trained if not again])
                if row["step"] != len(self.lags):
                    raise ValueError(f"step {row['step']} stands in line {len(self.lags)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no record of lags ({error!r})") from None
        if len(self.lags) < steps:
            raise ValueError(f"{file} has {len(self.lags)} steps, and the run {steps}")

    def most(self) -> int:
        return max(map(max, self.lags))

    def lag(self, slot: PromptSlot) -> int:
        return self.lags[slot.step - 1][slot.group]

    def ready(self, slot: PromptSlot, *, generated: int, longest: int) -> int:
        return slot.step
