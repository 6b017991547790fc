"""Make a folder with everything that a machine without network needs to install and check a run.

    bash tools/offline_bundle.sh FOLDER [--kind cuda] [--python 3.12]

FOLDER gets `wheels/`, `repository.bundle` (git clone reads it), `files/` (folders of --add, such as
models and data), `SHA256SUMS` and `join.sh`, which joins split files and compares the sums. Then
`MEGATRON_RL_BUNDLE=FOLDER bash tools/setup_env.sh` installs from it. Models' shapes and the tiny
task's model are in the repository.
"""

import argparse
import ast
import hashlib
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.lock import lock_file

ROOT = Path(__file__).parents[1]
# pip compares names of platforms: NCCL's wheels alone are for 2_18, cuda-bindings' for 2_24.
NAMED_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TOOLS = ("pip", "setuptools>=68", "wheel")
JOIN = """#!/usr/bin/env bash
# Join the parts of split files, then compare the sums of all files.
set -euo pipefail
cd "$(dirname "$0")"
find . -name '*.part000' | while read -r first; do
    cat "${first%000}"[0-9][0-9][0-9] > "${first%.part000}"
    rm "${first%000}"[0-9][0-9][0-9]
done
sha256sum --check --quiet SHA256SUMS
"""


def package_lists(*names: str) -> list[str]:
    """Requirements of these lists of setup.py."""
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in names
    }
    return [requirement for name in names for requirement in lists[name]]


def locked(kind: str, python: str) -> list[str]:
    """Releases of the lock from which tools/setup_env.sh installs, or [] if there is none."""
    lock = lock_file(kind, python)
    lines = lock.read_text().splitlines() if lock.is_file() else []
    return [line.removesuffix(" \\") for line in lines if re.match(r"\w.*==", line)]


def requirements(kind: str, python: str) -> list[str]:
    """Everything that tools/setup_env.sh requires without a lock, by the same lists."""
    command = [sys.executable, "-m", "megatron_rl.runtime.versions", kind, python]
    lines = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8", errors="replace"
    ).stdout
    releases = dict(line.split("=", 1) for line in lines.splitlines())
    torch, vllm, core = (releases[name].strip('"') for name in ("TORCH", "VLLM", "MEGATRON_CORE"))
    others = [one for one in package_lists("REQUIREMENTS", "DEVELOPMENT")
              if not one.startswith(("torch", "megatron-core"))]  # fmt: skip
    return [f"{torch}+cpu" if kind == "cpu" else torch, vllm, core, *others]


def platforms() -> tuple[str, ...]:
    """Platforms of wheels that run with this machine's C library or an older one, newest first."""
    _, version = platform.libc_ver()
    newest = int(version.partition(".")[2])
    return (*(f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)), *NAMED_PLATFORMS)


def download(
    wheels: Path,
    wanted: list[str],
    *,
    optional: list[str],
    kind: str,
    python: str,
    is_complete: bool = False,
) -> None:
    """Download wheels for that Python; on this machine's Python, sources are built into wheels.

    optional: requirements that may be missing; a missing one is printed.
    is_complete: `wanted` includes what its packages require.
    """
    command = [sys.executable, "-m", "pip"]
    if other := python != f"{sys.version_info.major}.{sys.version_info.minor}":
        command = [sys.executable, str(ROOT / "tools" / "pip_for_python.py"), python]
    command += ["download", "--quiet", "--dest", str(wheels)]
    if other:
        command += ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
        command += [word for name in platforms() for word in ("--platform", name)]
    torch = [one for one in wanted if one.startswith("torch==")]
    if torch and kind == "cpu":  # as in setup_env.sh: pip's own index may have the CPU build
        alone = [*command, "--no-deps", *torch]
        if subprocess.run(alone, check=False, stderr=subprocess.DEVNULL).returncode:
            subprocess.run([*alone, "--index-url", CPU_INDEX], check=True)
    command += ["--find-links", str(wheels)]
    subprocess.run([*command, *wanted, *(["--no-deps"] if is_complete else [])], check=True)
    if optional and subprocess.run([*command, *optional, *wanted], check=False).returncode:
        print(f"not in the bundle, because pip finds no wheels: {', '.join(optional)}")
    for source in wheels.glob("*.tar.gz"):
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*build, "--wheel-dir", str(wheels), str(source)], check=True)
        source.unlink()


def split(file: Path, limit: int) -> None:
    """Replace a file of more than `limit` bytes by parts NAME.part000, NAME.part001, ..."""
    if file.stat().st_size <= limit:
        return
    with file.open("rb") as whole:
        for number, part in enumerate(iter(lambda: whole.read(limit), b"")):
            file.with_name(f"{file.name}.part{number:03d}").write_bytes(part)
    file.unlink()


def finish(folder: Path, limit: int | None) -> None:
    """Write the sums of whole files and join.sh, then split what is larger than `limit` bytes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = []
    for file in files:
        with file.open("rb") as content:
            sums.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  ")
        sums[-1] += str(file.relative_to(folder))
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    (folder / "join.sh").write_text(JOIN, encoding="utf-8")
    for file in files if limit else ():
        split(file, limit)


def main() -> None:
    """Make the folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=("cuda", "cpu"), default="cuda")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="Version on the machine; default: this one.")
    parser.add_argument("--max-mib", type=int, help="Split files above this size.")
    parser.add_argument("--add", nargs="*", type=Path, default=[], help="Folders for files/.")
    parser.add_argument("--only", nargs="+", help="Requirements instead of all of this project's.")
    arguments = parser.parse_args()
    folder, wheels = arguments.folder, arguments.folder / "wheels"
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name a new folder")
    if not (ROOT / ".git").exists():
        parser.error(f"{ROOT} is no git clone, whose commit the bundle has; run this in a clone")
    wheels.mkdir(parents=True)
    # First, so that the wheels are those of this commit.
    repository = str(folder.resolve() / "repository.bundle")
    subprocess.run(["git", "bundle", "create", "--quiet", repository, "HEAD"], cwd=ROOT, check=True)
    kind, python = arguments.kind, arguments.python
    lock = [] if arguments.only else locked(kind, python)
    wanted = arguments.only or lock or requirements(kind, python)
    optional = [] if arguments.only or lock else package_lists("DATA", "REASONING_GYM")
    if not arguments.only:
        wanted = [*wanted, *TOOLS]
    download(wheels, wanted, optional=optional, kind=kind, python=python, is_complete=bool(lock))
    for source in arguments.add:
        shutil.copytree(source, folder / "files" / source.resolve().name)
    finish(folder, arguments.max_mib and arguments.max_mib << 20)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.0f} MiB, {len(list(wheels.iterdir()))} files in wheels/")


if __name__ == "__main__":
    main()
