"""Source code of a job: a copy of the package, its digest and its uncommitted changes."""

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import megatron_rl
from megatron_rl.config import ConfigError

PACKAGE = Path(megatron_rl.__file__).parent


@dataclass(frozen=True)
class Source:
    """Files to package, by their path in the package, and their state in git."""

    files: dict[str, Path]
    commit: str | None  # None: not in a git checkout
    uncommitted: str  # a diff that includes new files; "" if everything is committed

    @property
    def digest(self) -> str:
        """SHA-256 of names and contents; independent of the location of the files."""
        total = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{content}  {name}\n".encode())
        return total.hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Copy all files into a folder."""
        for name, file in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)


def read_source(verifier: str | None, folder: Path) -> Source:
    """Collect the package, and the verifier's module if it is in `folder`."""
    files = {f"{PACKAGE.name}/{name}": file for name, file in _files_of(PACKAGE).items()}
    if verifier is not None:
        files |= _verifier_files(verifier.partition(":")[0].split(".")[0], folder)
    commit = _git("rev-parse", "HEAD")
    if commit is None or _git("ls-files", "--error-unmatch", f"{PACKAGE.name}/__init__.py") is None:
        return Source(files, None, "")
    diff = _git("diff", "HEAD", "--", PACKAGE.name) or ""
    others = _git("ls-files", "--others", "--exclude-standard", "--", PACKAGE.name) or ""
    for name in others.splitlines():
        # git exits with status 1 if the files differ
        diff += _git("diff", "--no-index", "--", "/dev/null", name, good=(0, 1)) or ""
    return Source(files, commit.strip(), diff)


def require_committed(source: Source) -> None:
    """Raise ConfigError that lists uncommitted files."""
    if source.commit is None:
        raise ConfigError(f"--committed: {PACKAGE} is not in a git checkout; leave the option out")
    if source.uncommitted:
        changed = re.findall(r"^diff --git a/.* b/(.*)$", source.uncommitted, re.MULTILINE)
        raise ConfigError(
            "--committed: these files have uncommitted changes; commit them, or leave the option "
            "out to package them:\n  " + "\n  ".join(changed)
        )


def _files_of(folder: Path) -> dict[str, Path]:
    return {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def _verifier_files(package: str, folder: Path) -> dict[str, Path]:
    if package == PACKAGE.name:
        return {}
    spec = PathFinder.find_spec(package, [str(folder)])
    if spec is None or spec.origin is None:
        return {}  # installed in the environment; the job's preflight checks that
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return {origin.name: origin}
    return {f"{package}/{name}": file for name, file in _files_of(origin.parent).items()}


def _git(*arguments: str, good: tuple[int, ...] = (0,)) -> str | None:
    """Run git next to the package; returns its output, or None if it fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=PACKAGE.parent,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode in good else None
