"""The rows of the check, in the order of their value per minute."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.gpu_check import (
    actors,
    candidates,
    dry_run,
    engine,
    machine,
    mended,
    numerics,
    peers,
    runs,
    speed,
)  # fmt: skip
from tools.gpu_check.row import Row

# Rows that only `--budget` and `--only` run: they compare systems or settings.
LONG = (
    "peers", "windows", "heads", "swiglu", "attention_kept", "decode_graphs", "lora_7b",
    "routes", "layouts", "sampling",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """One row; consecutive rows of a family share a process."""

    check: Callable[[Row], None]
    family: str
    seconds: float  # on an H100; with a decimal point where measured there, else an estimate

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.check.__name__.removeprefix("check_")


ORDER = (
    Planned(machine.check_machine, "machine", 5),
    Planned(mended.check_mended, "mended", 20),
    Planned(actors.check_update, "actors", 3.9),
    Planned(engine.check_quickstart, "quickstart", 139.7),
    Planned(peers.check_peers, "peers", 500),
    Planned(speed.check_update_16k, "speed", 28.6),
    Planned(speed.check_update_32k, "speed", 13.7),
    Planned(candidates.check_heads, "candidates", 40),
    Planned(candidates.check_swiglu, "candidates", 20),
    Planned(candidates.check_attention_kept, "candidates", 20),
    Planned(runs.check_decode_graphs, "decode", 120),
    Planned(runs.check_lora_7b, "lora", 180),
    Planned(engine.check_engine, "engine", 80.4),
    Planned(speed.check_update_experts, "experts", 40),
    Planned(speed.check_routes, "routes", 60),
    Planned(speed.check_update_fp8, "speed_fp8", 30),
    Planned(peers.check_windows, "windows", 1100),
    Planned(machine.check_two_devices, "two_devices", 20),
    Planned(runs.check_layouts, "layouts", 240),
    Planned(numerics.check_groups, "numerics", 10.5),
    Planned(numerics.check_objective, "numerics", 0.6),
    Planned(numerics.check_head, "numerics", 0.3),
    Planned(numerics.check_attention, "numerics", 3.9),
    Planned(numerics.check_chunks, "numerics", 1.0),
    Planned(numerics.check_delta_rule, "numerics", 20),
    Planned(numerics.check_memory, "numerics", 2.7),
    Planned(actors.check_parity, "layers", 24.5),
    Planned(actors.check_transformer_engine, "layers", 9.9),
    Planned(actors.check_fp8, "layers", 1.3),
    Planned(actors.check_shared_prompts, "layers", 15),
    Planned(actors.check_critic, "layers", 5),
    Planned(dry_run.check_dry_run, "dry_run", 50.5),
    Planned(engine.check_sampling, "sampling", 140),
)
START_SECONDS = 15.0  # of a family's process: imports and the first use of the device
PATIENCE = 5.0  # a process is ended after so many times its estimate, but not before
LEAST_LIMIT = 240.0


def limit(rows: list[Planned]) -> float:
    """Return the seconds after which a family's process counts as hanging."""
    return max(LEAST_LIMIT, PATIENCE * (START_SECONDS + sum(row.seconds for row in rows)))


def families(rows: list[Planned]) -> list[list[Planned]]:
    """Group consecutive rows that share a process."""
    groups: list[list[Planned]] = []
    for row in rows:
        if groups and groups[-1][0].family == row.family:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def fitting(rows: list[Planned], left: float) -> list[Planned]:
    """Return the first rows of a family that fit into the seconds left, by their estimates."""
    needed, chosen = START_SECONDS, []
    for row in rows:
        needed += row.seconds
        if needed > left:
            break
        chosen.append(row)
    return chosen


def parse_budget(text: str) -> float:
    """Return the seconds of a budget such as `25m`; raises ArgumentTypeError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"] if found else 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time above 0; give seconds, or a number with s, m or h, such as 25m"
        )
    return seconds
