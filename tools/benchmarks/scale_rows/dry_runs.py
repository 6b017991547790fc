"""Dry runs of the layouts of Qwen3-235B-A22B: the actor's own code against the formula."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.apps.planning.built_in import MODELS, write_config_json
from tools.benchmarks.scale_rows import Row
from tools.benchmarks.scale_rows.layouts import REFUSED, SIZES, name_of, plan
from tools.compare_plan import compare_stages

TITLE = "Dry runs of these layouts"
TEXT = """
The whole model, all 94 layers with 128 experts, in every layout of the table above that is
possible: what `megatron-rl dry-run` measures, the peak of an update on the first pipeline
stage, which has the most micro-batches in flight, with the planner's recomputation and packs, full
of responses of maximum length, and the busiest expert rank with 1.5 times its share; then the
formula divided by it. No GPU is needed; a layout takes half a minute of one core.
"""


def rows() -> Iterator[Row]:
    """Yield the peak of each layout, and the formula's error."""
    shape = MODELS["Qwen3-235B-A22B"]
    with tempfile.TemporaryDirectory() as folder:
        model = write_config_json(shape, Path(folder) / "model")
        for devices, pipeline, expert in SIZES:
            result = plan(devices, pipeline, expert)
            parts = (result.options or result.rejected)[0].parts
            if devices // pipeline % expert:  # a stage has too few ranks
                continue
            name, row = name_of(parts), compare_stages(shape, parts, model, [0])
            found, ratio = row["dry_run_gib"], 1 + row["error"]
            yield Row("update, first stage", name, devices, REFUSED, found, "GiB", "dry run")
            yield Row("formula / dry run", name, devices, REFUSED, ratio, "", "dry run")
