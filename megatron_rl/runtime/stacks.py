"""Python stacks of the ranks of a node, grouped by content, and the ranks that are stalled.

The stacks are written by `faulthandler`, whose signal handler also runs inside C code and while
another thread owns the interpreter lock.
"""

import faulthandler
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIGNAL = signal.SIGUSR2  # makes a rank write its stacks
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)", re.M)
# A rank with one of these paths among its innermost frames waits for another rank.
_WAITING_IN = (
    "torch/distributed/",
    "megatron/core/pipeline_parallel/p2p",
    "megatron_rl/distributed/",
)
_INNERMOST = 6  # frames


@dataclass(frozen=True)
class StackSample:
    """State and stacks of one rank."""

    rank: int
    process: int
    state: str  # process state as in /proc; "" if the process has exited
    phase: str
    idle: float  # seconds since its last progress
    stack: str  # of its main thread
    everything: str  # of all threads

    @property
    def waits(self) -> bool:
        """True if the main thread waits for another rank."""
        frames = self.stack.splitlines()[:_INNERMOST]
        return any(path in frame for frame in frames for path in _WAITING_IN)


def answer_by_stacks(file: int) -> None:
    """Make this process append the stacks of all its threads to an open file on SIGNAL."""
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def split_stacks(text: str) -> dict[int, str]:
    """Split a faulthandler report into threads: identifier -> frames, innermost first."""
    return {int(match[1], 16): match[2] for match in _THREAD.finditer(text)}


def identify_stalled_ranks(samples: Sequence[StackSample]) -> tuple[list[StackSample], str]:
    """Return the ranks that the others wait for, and how they differ; [] if none differs."""
    shortest = min((sample.idle for sample in samples), default=0.0)
    signs: Mapping[str, list[StackSample]] = {
        "has exited": [sample for sample in samples if not sample.state],
        "is stopped (SIGSTOP or a debugger)": [
            sample for sample in samples if sample.state in "Tt" and sample.state
        ],
        "is blocked in the kernel, for example by a disk that does not respond": [
            sample for sample in samples if sample.state == "D"
        ],
        "does not wait for another rank": [
            sample for sample in samples if sample.stack and not sample.waits
        ],
        "stopped making progress before the others": [
            sample for sample in samples if sample.idle > shortest + 1.0
        ],
    }
    for sign, stalled in signs.items():
        if 0 < len(stalled) < len(samples) or (stalled and len(samples) == 1):
            return stalled, sign
    return [], "no rank differs from the others"


def describe(
    samples: Sequence[StackSample], *, stalled: Sequence[StackSample], headline: str
) -> str:
    """Return the report of a stall: the ranks, then their stacks, those of the stalled first."""
    lines = [headline, "", "rank  process  state  idle s  phase"]
    lines += [
        f"{sample.rank:>4}  {sample.process:>7}  {sample.state or 'gone':<5}  "
        f"{sample.idle:>6.1f}  {sample.phase}"
        for sample in samples
    ]
    groups: dict[str, list[StackSample]] = {}
    for sample in [*stalled, *(sample for sample in samples if sample not in stalled)]:
        groups.setdefault(sample.stack, []).append(sample)
    lines += ["", f"Main threads, {len(groups)} different stacks, innermost frame first"]
    for stack, members in groups.items():
        lines += ["", f"ranks {', '.join(str(sample.rank) for sample in members)}:"]
        lines += stack.rstrip("\n").splitlines() or ["  (no response)"]
    for members in groups.values():
        first = members[0]
        lines += ["", f"All threads of rank {first.rank}", "", first.everything.strip("\n")]
    return "\n".join(lines) + "\n"
