"""What steps have generated since the last checkpoint, as training takes it: lost to no kill."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.runs.files import written_whole
from megatron_rl.runs.group_file import write_groups
from megatron_rl.types import Group


class GeneratedGroups:
    """The folder `generated/` of a run directory: one file per step, complete or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, step: int) -> Path:
        """Where the groups of a step are kept until a checkpoint holds or has trained them."""
        return self.path / f"step_{step:06d}.parquet"

    def write(self, step: int, groups: Iterable[Group], about: Mapping[str, Any]) -> None:
        """Keep what a step generated, and what is to be known about it."""
        self.path.mkdir(exist_ok=True)
        with written_whole(self.file(step)) as partial:
            write_groups(partial, groups, about)

    def forget(self, step: int) -> None:
        """There is a checkpoint of `step`."""
        self._keep(lambda other: other > step)

    def rewind(self, step: int) -> None:
        """Keep only what the weights after `step` have generated."""
        self._keep(lambda other: other == max(step, 0) + 1)

    def _keep(self, is_kept: Any) -> None:
        for file in self.path.glob("*.parquet"):
            if not is_kept(int(file.stem.rsplit("_", 1)[-1])):
                file.unlink()
