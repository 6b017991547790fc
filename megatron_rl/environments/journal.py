"""A journal of answers, so that a run that is killed while generating repeats no side effect.

The resumed run generates the same turns again, and each that an environment had answered gets the
answer of the journal. One JSON line per answer: `turn` identifies place, row, seed and all messages
so far, so that no answer goes to another conversation or to a turn with other words.
"""

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

from megatron_rl.environments.process import Conversation


class Journal:
    """A folder whose files are read once, and a new file in it for further answers.

    All engines of a run share a folder, so a conversation may continue on another engine. The last
    line of a file may be cut, and is ignored. Lines are written one by one and not synced: they
    survive the process, not a power failure.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        for file in folder.glob("*.jsonl"):
            for line in file.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    entry = json.loads(line)
                    self._known[entry["turn"]] = entry
        self._file = (folder / f"{uuid.uuid4().hex}.jsonl").open("xb", buffering=0)

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
