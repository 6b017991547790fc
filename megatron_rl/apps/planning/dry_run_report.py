"""Text and JSON reports of a dry run."""

from __future__ import annotations

from typing import Any

from megatron_rl.apps.planning.dry_run import DryRun
from megatron_rl.apps.planning.meter import PhaseCount

GIB, MIB, TERA = 2**30, 2**20, 10**12
DESCRIBED = ("behavior", "update")
LINES = 8  # maximum number of source lines shown per table
CATEGORIES = ("weights", "gradients", "optimizer", "activations")
NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data", "ep": "expert"}


def describe(dry_run: DryRun) -> str:
    """Describe memory by phase, peak allocations by line, collectives, FLOPs and host stalls."""
    place = ", ".join(f"{NAMES[k]} {rank}/{size}" for k, (rank, size) in dry_run.place.items())
    of_update = dry_run.micro_batches_of_update
    lines = [
        f"rank {dry_run.rank} of {dry_run.processes} ({place}): {dry_run.parameters:,} parameters",
        f"packs of {len(dry_run.sequences)} sequences, {sum(dry_run.sequences):,} tokens, "
        f"{dry_run.local_tokens:,} on this rank; {dry_run.micro_batches} packs were run, "
        f"an update has {of_update} if every response has the maximum length",
        "",
        f"  {'GiB on the device':<20}" + "".join(f"{name:>13}" for name in (*CATEGORIES, "total")),
        _memory_line("built", dry_run.states),
        *(_memory_line(f"{k}, peak", p.by_category) for k, p in dry_run.phases.items()),
        _memory_line("asleep", dry_run.asleep)
        + f"   and {dry_run.asleep_host / GIB:.2f} on the host",
    ]
    for name, phase in dry_run.phases.items():
        if name not in DESCRIBED:  # the second update differs only in its memory
            continue
        lines += ["", f"{name}: {phase.flops / TERA:,.1f} TFLOP in matrix products and attention"]
        lines += _phase_lines(phase)
    return "\n".join(lines)


def _memory_line(name: str, by_category: Any) -> str:
    sizes = [by_category.get(category, 0) for category in CATEGORIES]
    sizes.append(sum(by_category.values()))
    return f"  {name:<20}" + "".join(f"{size / GIB:>13.2f}" for size in sizes)


def _phase_lines(phase: PhaseCount) -> list[str]:
    largest = sorted(phase.by_line.items(), key=lambda item: -item[1])
    shown = [(line, size) for (kind, line), size in largest if kind == "activations" and size]
    lines = ["  activations at the peak, by source line"] if shown else []
    lines += [f"    {size / GIB:8.2f} GiB  {line}" for line, size in shown[:LINES]]
    if len(shown) > LINES:
        rest = sum(size for _, size in shown[LINES:])
        lines.append(f"    {rest / GIB:8.2f} GiB  {len(shown) - LINES} other lines")
    if phase.messages:
        lines.append("  collectives                              group   ranks   calls         MiB")
    lines += [
        f"    {c.operation:<36} {c.group:<10} {c.ranks:>4} {c.count:>7} {c.bytes / MIB:>11,.1f}"
        for c in phase.collectives
    ]
    if phase.stalls:
        lines.append(f"  the host waits for the device {phase.stalls.total()} times")
        lines += [f"    {count:>6} x {line}" for line, count in phase.stalls.most_common(LINES)]
    return lines


def as_values(dry_run: DryRun) -> dict[str, Any]:
    """Convert all fields to JSON values; memory is in bytes."""
    values = {
        key: dict(value) if key in ("place", "states", "asleep") else value
        for key, value in vars(dry_run).items()
        if key != "phases"
    }
    values["phases"] = {
        name: {
            "peak": phase.peak,
            "by_category": phase.by_category,
            "by_line": {
                f"{category} {line}": size
                for (category, line), size in phase.by_line.items()
                if size
            },
            "flops": phase.flops,
            "collectives": [vars(each) for each in phase.collectives],
            "stalls": dict(phase.stalls),
        }
        for name, phase in dry_run.phases.items()
    }
    return values
