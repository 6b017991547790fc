"""research/docs/cuda.md lists every file in which something differs on a CUDA device."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIFFERS = re.compile(
    r"""\bis_cuda\b|\bhas_cuda\(|device\.type\b|torch\.cuda\.|\bon_cuda\b|"nccl"|pin_memory"""
)
# What differs there differs on the CPU; names of settings of other trainers.
OTHERS = {"actor/cpu_adaptation.py", "config/other_trainers_keys.py"}


def test_every_branch_on_device_is_in_table():
    page = (ROOT / "research" / "docs" / "cuda.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    package = ROOT / "megatron_rl"
    differing = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if DIFFERS.search(file.read_text())
    }
    assert listed == differing - OTHERS
