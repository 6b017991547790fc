"""Peak memory of the actor on this device, compared with `megatron-rl dry-run`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from tools.gpu_check.models import save_random_model
from tools.gpu_check.numerics import one_process
from tools.gpu_check.row import DEVICE

TOKENS = 16384 if DEVICE == "cuda" else 1024
BOUND = 0.1 if DEVICE == "cuda" else 0.01
PHASES = ("behavior", "update")


class AllocatorMeter:
    """Peaks of phases from CUDA's allocator statistics, with the interface of `Meter`."""

    def __init__(self):
        self.category, self.group_names, self.live_bytes_on_host = "", {}, 0
        self.peaks, self._now = {}, "start"
        self.before = torch.cuda.memory_allocated()

    @property
    def live_bytes(self):
        return {}

    @property
    def phases(self):
        return {}

    def begin(self, name):
        """Start phase `name`."""
        self.peaks[self._now] = torch.cuda.max_memory_allocated() - self.before
        torch.cuda.reset_peak_memory_stats()
        self._now = name

    def relabel(self, tensor, category):
        """Do nothing: the allocator has no categories."""


def _values(folder):
    return {
        "model": {"path": str(folder), "transformer_engine": False},
        "data": {"train": "none.jsonl", "max_prompt_tokens": TOKENS // 16},
        "rollout": {"max_response_tokens": TOKENS - TOKENS // 16},
        "trainer": {"tokens_per_micro_batch": TOKENS},
    }


def peaks_of_a_dry_run(config_file):
    """Return peak bytes by phase of a dry run in its own process."""
    command = [
        sys.executable, "-m", "megatron_rl.cli", "dry-run", str(config_file),
        "--processes", "1", "--device", DEVICE, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the dry run failed: {done.stderr.strip()}")
    phases = json.loads(done.stdout)[0]["phases"]
    return {name: phases[name]["peak"] for name in PHASES}


def allocated(config_file):
    """Return peak bytes by phase of the real actor."""
    from megatron_rl.apps.planning.dry_run import measure
    from megatron_rl.apps.planning.fake_device import Meter
    from megatron_rl.config import load_config

    config, topology = load_config(config_file), one_process()
    if DEVICE == "cuda":
        meter = AllocatorMeter()
        measure(config, topology, meter)
        return meter.peaks
    meter = Meter()
    with meter.watching():
        measure(config, topology, meter)
    return {name: phase.peak for name, phase in meter.phases.items()}


def check_dry_run(row):
    """Compare the dry run's peaks of the behavior pass and of an update with the real ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save_random_model(folder)
        config_file = Path(name) / "config.yaml"
        config_file.write_text(yaml.safe_dump(_values(folder)), encoding="utf-8")
        dry, real = peaks_of_a_dry_run(config_file), allocated(config_file)
    for phase in PHASES:
        row.note(f"{phase} GiB", real[phase] / 2**30)
        row.at_most(f"{phase} dry run / measured - 1", abs(dry[phase] / real[phase] - 1), BOUND)
