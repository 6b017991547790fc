"""Checkpoint folders of a run: written atomically, with checksums of every file.

step_NNNNNN/         complete: its manifest, written last, lists every file with size and SHA-256
.step_NNNNNN.partial being written, or left by a kill
.step_NNNNNN.old     being deleted or replaced, or left by a kill
step_NNNNNN.damaged  quarantined by a resumed run; its damage.txt contains the reason
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.runs.files import flush_to_disk
from megatron_rl.runtime.versions import check_format, stamp

NAME = re.compile(r"step_(\d{6})$")
MANIFEST = "trainer.json"
BLOCK = 8 << 20


class CheckpointFolders:
    """Folder `checkpoints/` of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path.parent / "id"  # contains the id of the run

    def folder(self, step: int) -> Path:
        """Return the folder of the complete checkpoint of a step."""
        return self.path / f"step_{step:06d}"

    def partial(self, step: int) -> Path:
        """Return the folder into which the checkpoint of a step is written."""
        return self.path / f".step_{step:06d}.partial"

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, damaged or not, oldest first."""
        names = (NAME.fullmatch(folder.name) for folder in self.path.glob("step_*"))
        return sorted(int(match.group(1)) for match in names if match)

    def has_critic(self, step: int) -> bool:
        """Return True if the checkpoint of a step contains a critic."""
        return (self.folder(step) / "critic").is_dir()

    def intact_steps(self) -> list[int]:
        """Return the steps of checkpoints whose files all exist with the right size."""
        return [step for step in self.steps() if self.problem(step) is None]

    def damaged(self) -> list[Path]:
        """Return the checkpoints that resumed runs have quarantined."""
        return sorted(self.path.glob("step_*.damaged*"))

    def begin(self, step: int) -> Path:
        """Create an empty folder into which the checkpoint of a step is written."""
        self.clean()
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def complete(
        self, step: int, *, sums: Mapping[str, str], digests: Sequence[Any], skipped: int = 0,
        skipped_by_critic: int = 0,
    ) -> None:  # fmt: skip
        """Write a checkpoint's manifest, then rename it into place, replacing an older checkpoint.

        sums: SHA-256 of every file by name. digests: digest of each rank's tensors.
        skipped: number of consecutive skipped updates of the policy just before the checkpoint;
        skipped_by_critic: of the critic.
        """
        partial = self.partial(step)
        files = {name: {"bytes": (partial / name).stat().st_size, "sha256": sums[name]}
                 for name in sorted(sums)}  # fmt: skip
        state = {**stamp(), "step": step, "run": self._run(), "skipped_in_a_row": skipped,
                 "critic_skipped_in_a_row": skipped_by_critic,
                 "files": files, "digests": list(digests)}  # fmt: skip
        (partial / MANIFEST).write_text(json.dumps(state, indent=1), encoding="utf-8")
        flush_to_disk(partial / MANIFEST)
        old = self._set_off(self.folder(step))
        partial.rename(self.folder(step))
        flush_to_disk(self.path)
        if old is not None:  # deleted last, so that a kill leaves one of the two
            shutil.rmtree(old)

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of a checkpoint; UserError if it cannot be read."""
        try:
            state = json.loads((self.folder(step) / MANIFEST).read_text(encoding="utf-8"))
            return {**state, "files": dict(state["files"]), "digests": list(state["digests"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{MANIFEST} cannot be read ({error})") from None

    def check_formats(self) -> None:
        """Raise UserError if a later release wrote a checkpoint that this one cannot read.

        Such a checkpoint is not damaged: it would be wrong to continue from an earlier checkpoint.
        """
        for step in self.steps():
            with contextlib.suppress(OSError, json.JSONDecodeError, TypeError):  # damaged
                check_format(
                    self.folder(step),
                    json.loads((self.folder(step) / MANIFEST).read_text(encoding="utf-8")),
                )

    def problem(self, step: int, *, share: tuple[int, int] | None = None) -> str | None:
        """Return a description of the damage to a checkpoint, or None if there is none.

        share: (i, n): also compare the SHA-256 of every n-th file, starting with the i-th.
        """
        try:
            manifest = self.manifest(step)
            if manifest.get("step") != step:
                return f"it is of step {manifest.get('step')}"
            run, mine = manifest.get("run"), self._run()
            if run and mine and run != mine:  # earlier runs had none
                return f"it is of another run, {run}"
            files = manifest["files"]
            for name, stated in files.items():
                file = self.folder(step) / name
                size = stated["bytes"]
                actual = file.stat().st_size if file.is_file() else None
                if actual != size:
                    return f"{name} " + (
                        "is missing" if actual is None else f"has {actual} of {size} bytes"
                    )
            if share is not None:
                for name in sorted(files)[share[0] :: share[1]]:
                    if sha256(self.folder(step) / name) != files[name]["sha256"]:
                        return f"{name} was modified: its SHA-256 differs"
        except (OSError, ValueError) as error:
            return str(error)
        except (KeyError, TypeError):
            return f"{MANIFEST} does not contain size and SHA-256 of {name}"
        return None

    def _run(self) -> str | None:
        return (
            self.run_file.read_text(encoding="utf-8").strip() if self.run_file.is_file() else None
        )

    def quarantine(self, step: int, reason: str) -> Path:
        """Rename a damaged checkpoint and record the reason; nothing is deleted."""
        quarantined = self.path / f"{self.folder(step).name}.damaged"
        count = 1
        while quarantined.exists():
            count += 1
            quarantined = self.path / f"{self.folder(step).name}.damaged-{count}"
        self.folder(step).rename(quarantined)
        (quarantined / "damage.txt").write_text(reason + "\n", encoding="utf-8")
        return quarantined

    def prune(
        self, *, keep: int, spared: Callable[[Sequence[int]], Container[int]] = lambda steps: ()
    ) -> None:
        """Delete incomplete checkpoints, and all but the newest `keep` intact checkpoints.

        spared: returns the intact steps that are kept regardless of age.
        """
        intact = self.intact_steps()
        kept = spared(intact)
        for step in intact[:-keep]:
            if step not in kept:
                self._remove(self.folder(step))
        self.clean()

    def clean(self) -> None:
        """Delete folders that a kill or a full disk left half-written or half-deleted.

        A checkpoint whose replacement was not completed is restored.
        """
        for folder in self.path.glob(".step_*.partial"):
            shutil.rmtree(folder)
        for old in self.path.glob(".step_*.old"):
            folder = self.path / old.name[1:].removesuffix(".old")
            if not folder.exists():
                old.rename(folder)
                if self.problem(int(folder.name[-6:])) is None:
                    continue
                folder.rename(old)
            shutil.rmtree(old)

    def _remove(self, folder: Path) -> None:
        """Delete a folder so that a kill cannot leave part of it under its name."""
        if (old := self._set_off(folder)) is not None:
            shutil.rmtree(old)

    def _set_off(self, folder: Path) -> Path | None:
        """Rename a folder to its `.old` name and return that, or None if it does not exist."""
        old = folder.with_name(f".{folder.name}.old")
        if not folder.exists():
            return None
        if old.exists():
            shutil.rmtree(old)
        return folder.rename(old)


def file_names(folder: Path) -> list[str]:
    """Return every file below a folder except its manifest, sorted."""
    files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in files if name != MANIFEST)


def sum_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Flush some files of a folder to disk, and return the SHA-256 of each."""
    for name in names:
        flush_to_disk(folder / name)
    return {name: sha256(folder / name) for name in names}


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
