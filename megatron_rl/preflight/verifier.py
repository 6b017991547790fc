"""Trial of a verifier on a real row before a run starts, in a process with a time limit."""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import megatron_rl
from megatron_rl.config.sections import MATH_ANSWER, RewardSection
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import NUMBER, Item, VerifierError
from megatron_rl.types import GradeResult, Prompt
from megatron_rl.workers.client import START_SECONDS

MESSAGE_SECONDS = 10.0  # seconds before a message explains what the command waits for
_FRAME = re.compile(r'^ *File "(?P<file>.+?)", line (?P<line>\d+)')
_NOT_USER_CODE = (str(Path(megatron_rl.__file__).parent), "<frozen ", "importlib")
_MAX_CHARACTERS = 400  # characters of a verifier's error


@dataclass
class VerifierTrial:
    """Worker that loads the verifier while other checks run, then grades one row."""

    reward: RewardSection
    pool: VerifierPool | None
    printed: list[str] = field(default_factory=list)
    problem: str | None = None  # why no worker could be started

    def problems(self, prompt: Prompt | None, *, keep_best: bool | str) -> list[str]:
        """List why the verifier cannot be used; prompt: the row to try it on, if any."""
        if self.pool is None:
            return [self._name(self.problem or "")]
        waiting = threading.Timer(MESSAGE_SECONDS, self._explain_waiting)
        waiting.daemon = True
        waiting.start()
        try:
            self.pool.start()
            if prompt is not None:
                item = Item("", prompt.ground_truth, prompt.data_source, prompt.row)
                return vote_problems(self.pool.try_on(item), self.reward, keep_best=keep_best)
        except VerifierError as error:
            return [self._name(describe(str(error), printed=self.printed))]
        finally:
            waiting.cancel()
        return []

    def _name(self, what: str) -> str:
        name = self.reward.verifier or MATH_ANSWER
        return f"reward.verifier={name}: {what.removeprefix(name).lstrip(': ')}"

    def _explain_waiting(self) -> None:
        print(  # noqa: T201 - the command has no console yet
            f"megatron-rl: waiting for reward.verifier={self.reward.verifier or MATH_ANSWER} to be "
            f"imported and tried (at most {START_SECONDS:.0f} s)",
            file=sys.stderr,
            flush=True,
        )


def vote_problems(
    grade_results: Sequence[GradeResult], reward: RewardSection, *, keep_best: bool | str
) -> list[str]:
    """List why these trial results give no majority vote for `trainer.keep_best`."""
    if "/maj@" not in str(keep_best) or any(one.reason != NUMBER for one in grade_results):
        return []
    return [
        f"trainer.keep_best={keep_best}: a majority vote needs answers, and reward.verifier="
        f"{reward.verifier} returns a reward alone, so this score is always null; let it return "
        "(reward, reason, answer), or keep the best by avg@ or pass@"
    ]


@contextlib.contextmanager
def start_trial(reward: RewardSection) -> Iterator[VerifierTrial]:
    """Start a worker that loads the verifier, and stop it when the context exits."""
    printed: list[str] = []
    try:
        pool = VerifierPool(reward, echo=printed.append)
    except VerifierError as error:
        yield VerifierTrial(reward, None, printed, str(error))
        return
    with pool:
        yield VerifierTrial(reward, pool, printed)


def describe(text: str, *, printed: list[str]) -> str:
    """Shorten a pool's error to one text: the error, the line of user code, and how to fix it."""
    head, _, trace = text.partition("\n")
    if not trace:
        last = f"; it printed: {printed[-1]}" if printed else ""
        return head.replace("; its output is in the log", "") + _exit_hint(head) + last
    is_import = "did not start" in head
    lines = trace.rstrip().splitlines()
    frames = [n for n, line in enumerate(lines) if _FRAME.match(line)]
    after = (frames or [-1])[-1] + 1
    raised = [line for line in lines[after:] if line and not line.startswith(" ")]
    what = " ".join(raised)[:_MAX_CHARACTERS]
    user_frames = [
        m
        for m in map(_FRAME.match, lines)
        if m and not any(part in m["file"] for part in _NOT_USER_CODE)
    ]
    if not user_frames:  # raised by this package: a wrong name or return value, with a hint
        return what.partition(": ")[2] if re.match(r"[\w.]+Error: ", what) else what
    place = f"{user_frames[-1]['file']}, line {user_frames[-1]['line']}"
    if is_import:
        return f"importing it failed: {what} ({place}); correct it, or install what it imports"
    return (
        f"it failed when it was tried: {what} ({place}); it is tried on the first row's ground "
        "truth and on an empty response, and must return a reward for both"
    )


def _exit_hint(head: str) -> str:
    """Return a hint for errors without a traceback: the process exited or hung."""
    if "exit status" in head:
        return ": it ended its process (sys.exit, os._exit, or a crash); return a reward instead"
    if "did not start in" in head:
        return ": importing its module does not finish; move slow work into the function"
    return ""
