"""Faults that `chaos.py` injects: kills and signals in a rank, and damage to checkpoints."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.runs.checkpoints import MANIFEST, CheckpointFolders

# -- in a rank -------------------------------------------------------------------------------------


def count_made(file: Path, *, is_mine: bool) -> None:
    """Log each update and rollout batch to a file on rank 0."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.rollouts.behavior import ModelLogprobs

    if int(os.environ["RANK"]):
        return
    for owner, name, what in ((MegatronActor, "update", "update"),
                              (ModelLogprobs, "score", "batch")):  # fmt: skip
        setattr(owner, name, _counted(getattr(owner, name), what, file))


def _counted(call: Callable[..., Any], what: str, file: Path) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"{what}\n")
        return result

    return counted


def kill_after(seconds: float, victims: str, file: Path, *, is_mine: bool) -> None:
    """Send SIGKILL to this rank or to the whole job, some seconds after the start."""
    count_made(file, is_mine=is_mine)
    if is_mine or victims == "both":
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def stop_after(seconds: float, file: Path, *, is_mine: bool) -> None:
    """Send SIGSTOP to this rank, some seconds after the start."""
    count_made(file, is_mine=is_mine)
    if is_mine:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGSTOP))
        timer.daemon = True
        timer.start()


def interrupt_in_phase(phase: str, step: int, times: int, file: Path, *, is_mine: bool) -> None:
    """Send SIGTERM to the launcher when rank 0 starts a phase, and again seconds later."""
    from megatron_rl.telemetry.metrics import PhaseClock

    count_made(file, is_mine=is_mine)
    if not is_mine:
        return
    launcher, begin, seen = os.getppid(), PhaseClock.phase, Counter()

    def ask() -> None:
        for again in range(times):
            if again:
                time.sleep(3.5 if times == 2 else 0.5)  # outside and inside the debounce interval
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGTERM)

    def phase_begins(self: Any, name: str) -> Any:
        seen[name] += 1
        if name == phase and seen[name] == step:
            threading.Thread(target=ask, daemon=True).start()
        return begin(self, name)

    PhaseClock.phase = phase_begins


# -- damage ---------------------------------------------------------------------------------------


def _largest(folder: Path) -> Path:
    return max(folder.rglob("*.distcp"), key=lambda file: file.stat().st_size)


def truncate(folder: Path, older: Path, whole: Path) -> None:
    """Truncate the largest file to half its size."""
    os.truncate(_largest(folder), _largest(folder).stat().st_size // 2)


def flip(folder: Path, older: Path, whole: Path) -> None:
    """Flip one bit in the middle of the largest file."""
    with _largest(folder).open("r+b") as stream:
        middle = stream.seek(0, os.SEEK_END) // 2
        stream.seek(middle)
        byte = stream.read(1)[0]
        stream.seek(middle)
        stream.write(bytes([byte ^ 1]))


def lose(folder: Path, older: Path, whole: Path) -> None:
    """Delete the largest file."""
    _largest(folder).unlink()


def exchange(folder: Path, older: Path, whole: Path) -> None:
    """Replace the files by those of an older checkpoint, keeping the manifest."""
    shutil.rmtree(folder / "actor")
    shutil.copytree(older / "actor", folder / "actor")


def halve(folder: Path, older: Path, whole: Path) -> None:
    """Delete every second file, as a kill during deletion would."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file())[::2]:
        file.unlink()


def adopt(folder: Path, older: Path, whole: Path) -> None:
    """Replace it by an intact checkpoint of another run."""
    newest = CheckpointFolders(whole / "checkpoints").intact_steps()[-1]
    shutil.rmtree(folder)
    shutil.copytree(CheckpointFolders(whole / "checkpoints").folder(newest), folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["step"] = int(folder.name.removeprefix("step_"))  # so that only its run differs
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


DAMAGE = {"truncated": truncate, "one bit flipped": flip, "a file missing": lose,
          "another's files": exchange, "half deleted": halve, "another run's": adopt}  # fmt: skip
