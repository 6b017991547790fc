"""Layouts of Qwen3-235B-A22B: which fit on devices of 80 GB, and their planned step."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.apps.planning.built_in import MODELS
from megatron_rl.apps.planning.devices import DEVICES
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.apps.planning.search import MAX_ENGINE_SHARE, Search, search
from megatron_rl.apps.planning.workload import workload_of
from megatron_rl.config import Config, parse_config
from research.tools.scale_rows import Row

TITLE = "Layouts of Qwen3-235B-A22B on H100"
TEXT = f"""
By the formulas of `megatron-rl plan` (docs/planning.md): whole experts on each rank, engines of 8
ranks, 512 prompts x 16 responses of up to 15,360 tokens (45% of it in the mean), four epochs of
four minibatches, the busiest expert rank with 1.5 times its share. GiB is the fullest moment of
training, behavior pass and weight sync on a device of {DEVICES["h100"].memory_gib} GiB, with 10
for a sleeping engine and the reserve; engines get the rest, at most {MAX_ENGINE_SHARE:.0%}. The
last number of a layout is the tokens of a pack: one or two responses of maximum length. The seconds
of a step lack the weight sync; none of these times has been measured. `before` is commit 4c2004c,
where 94 layers allowed 1 or 2 pipeline stages, and 4 key-value heads a tensor size of at most 4. Of
24 layouts one is impossible: 256 ranks in 8 stages have 32 ranks a stage, fewer than the 64 of its
experts.

Dry runs of all of them, and checks of the memory of all moments, are
[below](#dry-runs-of-these-layouts).
"""
REFUSED = "refused"
SIZES = list(itertools.product((256, 512, 1024), (4, 8), (8, 16, 32, 64)))  # ranks, stages, experts
POSSIBLE = [sizes for sizes in SIZES if sizes[0] // sizes[1] % sizes[2] == 0]  # a stage has enough


def rows() -> Iterator[Row]:
    """Yield memory and step of every layout."""
    for sizes in SIZES:
        yield from rows_of(*sizes)


def base_config(model: str | Path = "m") -> Config:
    """Return the settings that do not depend on the layout."""
    batch = {"prompts_per_step": 512, "responses_per_prompt": 16}
    return parse_config({"model": {"path": str(model)}, "data": {"train": "t"}, "rollout": batch})


def plan(devices: int, pipeline: int, expert: int) -> Search:
    """Plan one layout: it has one option, or is rejected."""
    shape, device = MODELS["Qwen3-235B-A22B"], DEVICES["h100"]
    workload = workload_of(base_config())
    fixed: dict[str, Any] = {
        "tensor": 8, "pipeline": pipeline, "context": 1, "expert": expert,
        "rollout_tensor": 8, "expert_share": 1.5,
    }  # fmt: skip
    return search(shape, device, devices, workload, fixed, pushes=0)


def name_of(parts: Parts) -> str:
    """Name a layout with its recomputation and the tokens of its packs."""
    return (
        f"tp8 pp{parts.pipeline} ep{parts.expert} etp1, recompute {parts.recompute}, "
        f"{parts.tokens:,} tokens"
    )


def rows_of(devices: int, pipeline: int, expert: int) -> Iterator[Row]:
    """Yield memory and step of one layout."""
    result = plan(devices, pipeline, expert)
    if not result.options:
        name = f"tp8 pp{pipeline} ep{expert} etp1"
        (rejected,) = result.rejected
        yield Row("fits", name, devices, REFUSED, rejected.reason, "", "counted")
        return
    (option,) = result.options
    moments = [option.memory[phase] for phase in ("train", "behavior", "push")]
    gib = max(moments) * DEVICES["h100"].memory_gib
    name = name_of(option.parts)
    yield Row("fullest moment", name, devices, REFUSED, gib, "GiB", "counted")
    yield Row("step", name, devices, REFUSED, option.step_seconds, "s", "counted")
