"""Dry runs of the layouts of Qwen3-235B-A22B: the actor's own code against the formula."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.apps.planning.built_in import MODELS, write_config_json
from megatron_rl.apps.planning.fit import ENGINE, find_lacking, moments
from megatron_rl.apps.planning.layout_report import config_of
from megatron_rl.config import Config
from research.tools.scale_rows import Row
from research.tools.scale_rows.layouts import POSSIBLE, REFUSED, base_config, name_of, plan
from tools.compare_plan import compare_stages

TITLE = "Dry runs of these layouts"
TEXT = """
The whole model, all 94 layers with 128 experts, in every layout of the table above that is
possible: what `megatron-rl dry-run` measures, the peak of an update on the first pipeline
stage, which has the most micro-batches in flight, with the planner's recomputation and packs, full
of responses of maximum length, and the busiest expert rank with 1.5 times its share; then the
formula divided by it. Where the planner has an option, `megatron-rl dry-run --fit 79.6` then checks
its config, as `megatron-rl plan --write` writes it: the moment that needs the most memory on the
first, the middle and the last stage, with the reserve of 6 GiB. It is generation where the engine
gets all that is left. No GPU is needed; a layout takes a minute of one core.
"""
DEVICE = 79.6  # GiB that an H100 has for a process


def rows() -> Iterator[Row]:
    """Yield the peak of each layout, and the formula's error."""
    shape = MODELS["Qwen3-235B-A22B"]
    with tempfile.TemporaryDirectory() as folder:
        model = write_config_json(shape, Path(folder) / "model")
        for devices, pipeline, expert in POSSIBLE:
            result = plan(devices, pipeline, expert)
            parts = (result.options or result.rejected)[0].parts
            name, row = name_of(parts), compare_stages(shape, parts, model, [0])
            found, ratio = row["dry_run_gib"], 1 + row["error"]
            yield Row("update, first stage", name, devices, REFUSED, found, "GiB", "dry run")
            yield Row("formula / dry run", name, devices, REFUSED, ratio, "", "dry run")
            if result.options:
                config = config_of(result.options[0], base_config(model=model))
                now, unit = _fullest(config, devices)
                what = f"fullest moment, --fit {DEVICE:g}"
                yield Row(what, name, devices, REFUSED, now, unit, "dry run")


def _fullest(config: Config, devices: int) -> tuple[float | str, str]:
    """Return GiB and name of the moment of three stages that needs the most memory."""
    room = int(DEVICE * 2**30)
    lacking, runs = find_lacking(config, processes=devices, device_bytes=room)
    if lacking:
        return lacking[0].describe().partition(" (")[0], ""
    of_device = [each for run in runs for each in moments(config, run, room) if each.name != ENGINE]
    fullest = max(of_device, key=lambda each: each.needed)
    return fullest.needed / 2**30, f"GiB, {fullest.name}"
