"""A journal of answers, so that a run that is killed while generating repeats no side effect.

The resumed run generates the same turns again, and each that an environment had answered gets the
answer of the journal. One JSON line per answer: `turn` identifies place, row, seed and all messages
so far, so that no answer goes to another conversation or to a turn with other words.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_rl.environments.process import Conversation


class Journal:
    """A file of answers that is read once, then appended to.

    A last line that was cut when the process was killed is removed. Lines are written one by one
    and not synced: they survive the process, not a power failure.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._known: dict[str, dict[str, Any]] = {}
        for line in whole:
            entry = json.loads(line)
            self._known[entry["turn"]] = entry
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(sum(map(len, whole)))
        self._file.seek(0, 2)

    def answer(self, conversation: Conversation) -> bool:
        """Fill in the answer to the last turn if the journal has it."""
        entry = self._known.get(_identify(conversation))
        if entry is None:
            return False
        turn = conversation.turns[-1]
        turn.answer, turn.timed_out = entry["answer"], entry["timed_out"]
        return True

    def add(self, conversation: Conversation) -> None:
        """Append the answer to the last turn."""
        turn, name = conversation.turns[-1], _identify(conversation)
        entry = {"turn": name, "answer": turn.answer, "timed_out": turn.timed_out}
        self._known[name] = entry
        self._file.write(json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _identify(conversation: Conversation) -> str:
    messages = [turn.message for turn in conversation.turns]
    whole = [conversation.place, conversation.row, conversation.seed, messages]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()
