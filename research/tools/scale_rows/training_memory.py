"""Parts of the memory check of a mixture of experts, and sums of weight gradients."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_rl.apps.planning.dry_run import DryRun, dry_run_rank
from megatron_rl.apps.planning.fit import TRAINING, moments
from megatron_rl.apps.planning.models import MODELS, write_config_json
from megatron_rl.config import Config, parse_config
from research.tools.scale_rows import Row
from tests.unit.actor.test_transformer_engine import gradient_errors

TITLE = "Weight gradients, experts and the memory check"
TEXT = """
*Weight gradients* without fusion are rounded to bfloat16 in each micro-batch and then added to the
float32 sums; with Transformer Engine on CUDA the product adds to the sums itself. Errors are those
of a product of 256 tokens in 32 micro-batches over the exact sum, computed on the CPU; traffic is
what a weight's gradient moves to and from memory in each micro-batch. `before`, commit 4c2004c,
had no fusion.

*The memory check* of 16 of 235B's layers in 8 stages at tp8 dp4 ep16, 256 ranks, packs of 16,384
tokens with recomputation of attention: the peak of training on the first stage if the busiest
expert rank receives an equal share of the tokens, as `before` assumed, 1.5 times it
(`run.largest_expert_share`), or twice; then what the check adds to that peak and did not count
before.

On CUDA, tokens are sorted by expert in Transformer Engine's kernels (`moe_permute_fusion`). Neither
that nor grouped products have been timed on a GPU here, so the planner's price of experts is
[unmeasured](../../docs/planning.md). Megatron's `flex` dispatcher is not offered
([why](../../docs/architecture.md#two-backends-one-code)).
"""
GIB = 2**30
LAYOUT = "235B, 16 layers, tp8 pp8 dp4 ep16 etp1"


def _config(model: Path, share: float) -> Config:
    return parse_config(
        {
            "model": {"path": str(model)},
            "data": {"train": "none.jsonl"},
            "run": {"largest_expert_share": share},
            "parallel": {"tensor": 8, "pipeline": 8, "expert": 16},
            "rollout": {"tensor": 8, "prompts_per_step": 512, "responses_per_prompt": 16},
            "trainer": {"tokens_per_micro_batch": 16384, "recompute": "selective"},
        }
    )


def _dry_run(model: Path, share: float) -> tuple[Config, DryRun]:
    config = _config(model, share)
    return config, dry_run_rank(config, processes=256)


def rows() -> Iterator[Row]:
    """Yield errors and traffic of weight gradients, and parts of the memory check."""
    before, now = gradient_errors(32)
    yield Row("weight gradients: relative error", "any", 1, before, now, "", "measured")
    # The gradient in bfloat16 is written and read, and the float32 sum is read and written.
    yield Row("weight gradients: traffic", "any", 1, 12, 8, "bytes a weight", "counted")
    shape = replace(MODELS["Qwen3-235B-A22B"], num_layers=16)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config_json(shape, Path(folder) / "model")
        equal = _dry_run(model, 1.0)[1].peak / GIB
        for share in (1.5, 2.0):
            config, run = _dry_run(model, share)
            what = f"training's peak, {share:g} times an equal share"
            yield Row(what, LAYOUT, 256, equal, run.peak / GIB, "GiB", "dry run")
        (training,) = (each for each in moments(config, run, None) if each.name == TRAINING)
        yield Row("communicators", LAYOUT, 256, "not counted", run.communicators, "", "dry run")
        for name, size in training.parts.items():
            if name == "prepared packs" or "communicators" in name:
                yield Row(f"added: {name}", LAYOUT, 256, 0, size / GIB, "GiB", "dry run")
