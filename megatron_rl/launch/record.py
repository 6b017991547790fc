"""What was launched under which name, kept for this user, found from any directory."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.runs.files import write_atomically


@dataclass(frozen=True)
class Record:
    """The newest launch of a name."""

    name: str
    run: str  # the run directory
    folder: str  # of the launch, in the run directory
    steps: int
    jobs: list[str]  # SLURM's ids, in the order of the chain; none on one machine
    process: int | None = None  # on one machine: the launcher
    host: str = ""

    def save(self) -> None:
        """Keep it, in place of an earlier one of this name."""
        file = _file(self.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(self), indent=1))


def find_record(name: str) -> Record:
    """The newest launch of a name; ConfigError with the names that are known."""
    try:
        return Record(**json.loads(_file(name).read_text()))
    except FileNotFoundError as error:
        known = sorted(file.stem for file in _home().glob("*.json"))
        raise ConfigError(
            f"nothing was launched as {name!r}; known here: {', '.join(known) or 'nothing'}"
        ) from error


def has_record(name: str) -> bool:
    """Whether a launch of this name is known."""
    return _file(name).exists()


def _file(name: str) -> Path:
    return _home() / f"{name}.json"


def _home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "megatron_rl" / "launches"
