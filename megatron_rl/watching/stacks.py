"""What the ranks of a node are doing: their Python stacks, alike ones together, and who stands out.

The stacks are written by `faulthandler`, whose signal handler runs inside C code and while another
thread holds the interpreter's lock.
"""

import faulthandler
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIGNAL = signal.SIGUSR2  # asks a rank for its stacks
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)", re.M)
# A rank with one of these among its innermost frames waits for another rank.
_WAITING_IN = (
    "torch/distributed/",
    "megatron/core/pipeline_parallel/p2p",
    "megatron_rl/distributed/",
)
_INNERMOST = 6  # frames


@dataclass(frozen=True)
class Look:
    """One rank as it was found."""

    rank: int
    process: int
    state: str  # of the process, as /proc names it; "" where it has ended
    phase: str
    idle: float  # seconds since it counted
    stack: str  # of its main thread
    everything: str  # of all threads

    @property
    def waits(self) -> bool:
        """Whether it waits for another rank."""
        frames = self.stack.splitlines()[:_INNERMOST]
        return any(place in frame for frame in frames for place in _WAITING_IN)


def answer_by_stacks(file: int) -> None:
    """Let this process append the stacks of all its threads to an open file when SIGNAL comes."""
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def split_stacks(text: str) -> dict[int, str]:
    """The threads of one of faulthandler's reports: identifier -> frames, the innermost first."""
    return {int(match[1], 16): match[2] for match in _THREAD.finditer(text)}


def find_culprits(looks: Sequence[Look]) -> tuple[list[Look], str]:
    """The ranks that the others wait for, and what tells them apart; none where nothing does."""
    latest = min((look.idle for look in looks), default=0.0)
    signs: Mapping[str, list[Look]] = {
        "has ended": [look for look in looks if not look.state],
        "is stopped (SIGSTOP or a debugger)": [
            look for look in looks if look.state in "Tt" and look.state
        ],
        "is inside the kernel, as on a disk that does not answer": [
            look for look in looks if look.state == "D"
        ],
        "does not wait for another rank": [look for look in looks if look.stack and not look.waits],
        "counted last before the others": [look for look in looks if look.idle > latest + 1.0],
    }
    for sign, found in signs.items():
        if 0 < len(found) < len(looks) or (found and len(looks) == 1):
            return found, sign
    return [], "no rank stands out"


def describe(looks: Sequence[Look], *, culprits: Sequence[Look], headline: str) -> str:
    """The report of a stall: ranks, then alike stacks together, the culprits' first."""
    lines = [headline, "", "rank  process  state  idle s  phase"]
    lines += [
        f"{look.rank:>4}  {look.process:>7}  {look.state or 'gone':<5}  {look.idle:>6.1f}  "
        f"{look.phase}"
        for look in looks
    ]
    groups: dict[str, list[Look]] = {}
    for look in [*culprits, *(look for look in looks if look not in culprits)]:
        groups.setdefault(look.stack, []).append(look)
    lines += ["", f"Main threads, {len(groups)} kinds, innermost frame first"]
    for stack, alike in groups.items():
        lines += ["", f"ranks {', '.join(str(look.rank) for look in alike)}:"]
        lines += stack.rstrip("\n").splitlines() or ["  (no answer)"]
    for alike in groups.values():
        lines += ["", f"All threads of rank {alike[0].rank}", "", alike[0].everything.strip("\n")]
    return "\n".join(lines) + "\n"
