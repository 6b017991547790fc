"""A rehearsal as a person reads it, and as plain values."""

from __future__ import annotations

from typing import Any

from megatron_rl.planning.meter import PhaseCount
from megatron_rl.planning.rehearsal import Rehearsal

GIB, MIB, TERA = 2**30, 2**20, 10**12
DESCRIBED = ("behavior", "update")
LINES = 8  # source lines of a peak, and of host stalls, that are shown
CATEGORIES = ("weights", "gradients", "optimizer", "activations")
NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data", "ep": "expert"}


def describe(rehearsal: Rehearsal) -> str:
    """Memory by phase, where its peak comes from, collectives, FLOPs and host stalls."""
    place = ", ".join(f"{NAMES[k]} {rank}/{size}" for k, (rank, size) in rehearsal.place.items())
    of_update = rehearsal.micro_batches_of_update
    lines = [
        f"rank {rehearsal.rank} of {rehearsal.processes} ({place}): "
        f"{rehearsal.parameters:,} parameters",
        f"packs of {len(rehearsal.sequences)} sequences, {sum(rehearsal.sequences):,} tokens, "
        f"{rehearsal.local_tokens:,} on this rank; {rehearsal.micro_batches} of them below, "
        f"{of_update} in an update where every response is of full length",
        "",
        f"  {'GiB on the device':<20}" + "".join(f"{name:>13}" for name in (*CATEGORIES, "total")),
        _memory_line("built", rehearsal.states),
        *(_memory_line(f"{k}, peak", p.by_category) for k, p in rehearsal.phases.items()),
        _memory_line("asleep", rehearsal.asleep)
        + f"   and {rehearsal.asleep_host / GIB:.2f} on the host",
    ]
    for name, phase in rehearsal.phases.items():
        if name not in DESCRIBED:  # the second update is like the first, but for its memory
            continue
        lines += ["", f"{name}: {phase.flops / TERA:,.1f} TFLOP in matrix products and attention"]
        lines += _phase_lines(phase)
    return "\n".join(lines)


def _memory_line(name: str, held: Any) -> str:
    sizes = [held.get(category, 0) for category in CATEGORIES]
    sizes.append(sum(held.values()))
    return f"  {name:<20}" + "".join(f"{size / GIB:>13.2f}" for size in sizes)


def _phase_lines(phase: PhaseCount) -> list[str]:
    largest = sorted(phase.by_line.items(), key=lambda item: -item[1])
    shown = [(line, size) for (kind, line), size in largest if kind == "activations" and size]
    lines = ["  activations at the peak, by the line that made them"] if shown else []
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


def as_values(rehearsal: Rehearsal) -> dict[str, Any]:
    """Everything, as JSON can hold it; memory in bytes."""
    values = {
        key: dict(value) if key in ("place", "states", "asleep") else value
        for key, value in vars(rehearsal).items()
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
        for name, phase in rehearsal.phases.items()
    }
    return values
