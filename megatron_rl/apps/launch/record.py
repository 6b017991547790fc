"""Records of launches by run name, stored per user so that they are found from any directory."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config import ConfigError, load_config
from megatron_rl.runs.files import write_atomically


@dataclass(frozen=True)
class Record:
    """Newest launch of a run."""

    name: str
    run: str  # the run directory
    folder: str  # folder of the launch, in the run directory
    steps: int
    jobs: list[str]  # SLURM ids in the order of the chain; empty for local runs
    process: int | None = None  # id of the launcher process of a local run
    host: str = ""

    @property
    def is_launched(self) -> bool:
        """True if `megatron-rl launch` started the run, not `megatron-rl train`."""
        return bool(self.jobs) or self.process is not None

    def save(self) -> None:
        """Write the record, replacing an earlier one with this name."""
        file = _file(self.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(asdict(self), indent=1))


def find_record(name: str) -> Record:
    """Find the newest launch of a name, or a run of `megatron-rl train` by name or folder.

    Raises ConfigError that lists the known names.
    """
    try:
        return Record(**json.loads(_file(name).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        for run in (Path(name), Path("runs") / name):
            if (run / "config.yaml").is_file():
                steps = load_config(run / "config.yaml").trainer.steps
                path = str(run.absolute())
                return Record(name=name, run=path, folder=path, steps=steps, jobs=[])
        known = sorted(file.stem for file in _home().glob("*.json"))
        raise ConfigError(
            f"nothing was launched as {name!r}; known here: {', '.join(known) or 'nothing'}. Give "
            "the folder of a run that megatron-rl train started, as runs/NAME"
        ) from error


def has_record(name: str) -> bool:
    """Return True if a launch of this name is recorded."""
    return _file(name).exists()


def _file(name: str) -> Path:
    return _home() / f"{name}.json"


def _home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "megatron_rl" / "launches"
