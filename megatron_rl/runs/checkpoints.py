"""The checkpoints of a run: whole under their name or not there, and each proves itself.

step_NNNNNN/         complete: its manifest, written last, lists every file with size and SHA-256
.step_NNNNNN.partial being written, or left by a kill
.step_NNNNNN.old     being deleted or replaced, or left by a kill
step_NNNNNN.damaged  set aside by a resumed run; damage.txt in it says why
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = re.compile(r"step_(\d{6})$")
MANIFEST = "trainer.json"
BLOCK = 8 << 20


class CheckpointFolders:
    """The folder `checkpoints/` of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path.parent / "id"  # which run's these are

    def folder(self, step: int) -> Path:
        """Where the complete checkpoint of a step lies."""
        return self.path / f"step_{step:06d}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f".step_{step:06d}.partial"

    def steps(self) -> list[int]:
        """Steps of all folders that stand under a checkpoint's name, oldest first."""
        names = (NAME.fullmatch(folder.name) for folder in self.path.glob("step_*"))
        return sorted(int(match.group(1)) for match in names if match)

    def sound_steps(self) -> list[int]:
        """Steps of the checkpoints whose files are all there in their size, oldest first."""
        return [step for step in self.steps() if self.problem(step) is None]

    def damaged(self) -> list[Path]:
        """The checkpoints that resumed runs have set aside."""
        return sorted(self.path.glob("step_*.damaged*"))

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into."""
        self.clean()
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def complete(
        self, step: int, *, sums: Mapping[str, str], digests: Sequence[Any], skipped: int = 0
    ) -> None:
        """Give a written checkpoint its manifest, then its name; one of the same step goes.

        sums: SHA-256 by file name, of every file. digests: of each rank's tensors.
        skipped: updates in a row that were, just before it.
        """
        partial = self.partial(step)
        files = {name: {"bytes": (partial / name).stat().st_size, "sha256": sums[name]}
                 for name in sorted(sums)}  # fmt: skip
        state = {"step": step, "run": self._run(), "skipped_in_a_row": skipped, "files": files,
                 "digests": list(digests)}  # fmt: skip
        (partial / MANIFEST).write_text(json.dumps(state, indent=1))
        flush_to_disk(partial / MANIFEST)
        old = self._set_off(self.folder(step))
        partial.rename(self.folder(step))
        flush_to_disk(self.path)
        if old is not None:  # not before: a kill would leave neither
            shutil.rmtree(old)

    def manifest(self, step: int) -> dict[str, Any]:
        """What the manifest says; ValueError where it cannot be read."""
        try:
            state = json.loads((self.folder(step) / MANIFEST).read_text())
            return {**state, "files": dict(state["files"]), "digests": list(state["digests"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{MANIFEST} cannot be read ({error})") from None

    def problem(self, step: int, *, share: tuple[int, int] | None = None) -> str | None:
        """What is wrong with a checkpoint, None if nothing was found.

        share: (i, n): read every n-th file too, from the i-th, and compare its SHA-256.
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
                found = file.stat().st_size if file.is_file() else None
                if found != size:
                    return f"{name} " + (
                        "is missing" if found is None else f"has {found} of {size} bytes"
                    )
            if share is not None:
                for name in sorted(files)[share[0] :: share[1]]:
                    if sha256(self.folder(step) / name) != files[name]["sha256"]:
                        return f"{name} is not what was written: its SHA-256 differs"
        except (OSError, ValueError) as error:
            return str(error)
        except (KeyError, TypeError):
            return f"{MANIFEST} does not state size and SHA-256 of {name}"
        return None

    def _run(self) -> str | None:
        return self.run_file.read_text().strip() if self.run_file.is_file() else None

    def set_aside(self, step: int, reason: str) -> Path:
        """Take a damaged checkpoint out of the way, with its reason; nothing is deleted."""
        aside = self.path / f"{self.folder(step).name}.damaged"
        count = 1
        while aside.exists():
            count += 1
            aside = self.path / f"{self.folder(step).name}.damaged-{count}"
        self.folder(step).rename(aside)
        (aside / "damage.txt").write_text(reason + "\n")
        return aside

    def prune(
        self, *, keep: int, spared: Callable[[Sequence[int]], Container[int]] = lambda steps: ()
    ) -> None:
        """Delete all but the newest `keep` sound checkpoints, and what is not complete.

        spared: of the sound steps those that stay, however old.
        """
        sound = self.sound_steps()
        stays = spared(sound)
        for step in sound[:-keep]:
            if step not in stays:
                self._remove(self.folder(step))
        self.clean()

    def clean(self) -> None:
        """Delete what kills and full disks left half-written or half-deleted.

        A checkpoint that was to be replaced stands again where its successor did not come.
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
        """Delete a folder that a kill in between may not leave under its name."""
        if (old := self._set_off(folder)) is not None:
            shutil.rmtree(old)

    def _set_off(self, folder: Path) -> Path | None:
        """Take a folder out of its name; where it is then, None if there was none."""
        old = folder.with_name(f".{folder.name}.old")
        if not folder.exists():
            return None
        if old.exists():
            shutil.rmtree(old)
        return folder.rename(old)


def file_names(folder: Path) -> list[str]:
    """Every file below a folder but its manifest, sorted."""
    files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in files if name != MANIFEST)


def sum_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of some files of a folder, which are on the disk afterwards."""
    for name in names:
        flush_to_disk(folder / name)
    return {name: sha256(folder / name) for name in names}


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Return when what was written to a file, or renamed in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
