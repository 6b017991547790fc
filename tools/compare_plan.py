"""Compare the planner's memory with dry runs of the actor, on a few hundred layouts.

    python tools/compare_plan.py --part 1/4 --out /tmp/plan-1.csv

Models have the widths of published ones but only 8 layers, so that a dry run takes seconds. For
each layout, dry runs of the first and the last stage measure the states and the peak of an update,
and the larger stage is compared. Prints one line per layout, then the largest errors.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.apps.planning.built_in import MODELS, write_config_json
from megatron_rl.apps.planning.footprint import activation_bytes, prepared_pack_bytes, state_bytes
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.config import Config, parse_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.pieces import shares_key_heads

GIB = 2**30
NAMES = (
    "DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "GLM-4.5-Air",
    "Moonlight-16B-A3B-Instruct", "gpt-oss-20b-bf16",
)  # fmt: skip
LAYERS, EXPERTS = 8, 32  # of the models of the dry runs
LAYOUTS = [  # tensor, pipeline, context, data
    (1, 1, 1, 8), (2, 1, 1, 4), (1, 1, 2, 4), (1, 1, 4, 2), (2, 1, 2, 2), (4, 1, 1, 2),
    (1, 2, 1, 4), (2, 2, 1, 4), (1, 2, 2, 4), (2, 2, 2, 4), (1, 4, 1, 4), (1, 4, 2, 8),
    (2, 4, 2, 2), (4, 2, 2, 4),
]  # fmt: skip
PROMPT, RESPONSE = 1024, 15360


def layouts() -> Iterator[tuple[str, Parts]]:
    """Yield model names and layouts."""
    variants = [(16384, "none"), (16384, "selective"), (16384, "full"), (32768, "none")]
    for name, sizes, (tokens, recompute) in itertools.product(NAMES, LAYOUTS, variants):
        shape = shape_of(name)
        tensor, pipeline, context, data = sizes
        if not shares_key_heads(shape, tp_size=tensor) or (
            shape.experts and recompute == "selective"
        ):
            continue
        spread = context * data
        experts = [1] if shape.experts is None else sorted({2, spread})
        for expert in experts:
            yield (
                name,
                Parts(
                    tensor,
                    pipeline,
                    context,
                    data,
                    expert=expert,
                    expert_tensor=1 if shape.traits.biases else None,
                    recompute=recompute,
                    tokens=tokens,
                ),
            )


def shape_of(name: str) -> ModelShape:
    """Return a model's shape with fewer layers and experts."""
    shape = replace(MODELS[name], num_layers=LAYERS)
    if shape.experts is not None:
        shape = replace(shape, experts=replace(shape.experts, num_experts=EXPERTS))
    if shape.local_layers is not None:
        full = tuple(layer for layer in shape.local_layers.full if layer < LAYERS)
        shape = replace(shape, local_layers=replace(shape.local_layers, full=full))
    return shape


def config_for(parts: Parts, model: Path) -> Config:
    """Build the config of a run with this layout."""
    lora = {"rank": parts.lora_rank, "targets": list(parts.lora_targets)}
    return parse_config(
        {
            "lora": lora if parts.lora_rank else None,
            "optimizer": {"learning_rate": 1e-5},
            "model": {"path": str(model)},
            "data": {"train": "none.parquet", "max_prompt_tokens": PROMPT},
            "parallel": {
                "tensor": parts.tensor,
                "pipeline": parts.pipeline,
                "context": parts.context,
                "expert": parts.expert,
                "expert_tensor": parts.expert_slices if parts.expert > 1 else None,
                "stage_layers": parts.stage_layers,
            },
            "run": {"largest_expert_share": parts.expert_share},
            "rollout": {"max_response_tokens": RESPONSE},
            "trainer": {
                "recompute": parts.recompute,
                "tokens_per_micro_batch": parts.tokens,
            },
        }
    )


def compare(name: str, parts: Parts, model: Path) -> dict[str, Any]:
    """Compare memory by formula and by dry run, for the stage that needs the most."""
    shape = shape_of(name)
    return {"model": name, **compare_stages(shape, parts, model, parts.stages(shape))}


def compare_stages(
    shape: ModelShape, parts: Parts, model: Path, stages: Sequence[int]
) -> dict[str, Any]:
    """Compare an update's peak by formula and by dry run, for the one of `stages` with the most."""
    from megatron_rl.apps.planning.dry_run import dry_run_rank

    planned, measured, states = [], [], []
    for stage in stages:
        dry_run = dry_run_rank(
            config_for(parts, model),
            processes=parts.world_size,
            rank=stage * parts.world_size // parts.pipeline,
        )
        awake, _ = state_bytes(shape, parts, stage=stage)
        kept = activation_bytes(
            shape,
            parts,
            stage=stage,
            micro_batches=dry_run.micro_batches,
            prompt_part=PROMPT / (PROMPT + RESPONSE),
        )
        packs = dry_run.micro_batches * prepared_pack_bytes(shape, parts)
        planned.append(awake + kept + packs)
        measured.append(dry_run.phases["update"].peak)
        measured_states = sum(size for key, size in dry_run.states.items() if key != "activations")
        states.append(awake / measured_states - 1)
    return {
        "layout": str(parts),
        "planned_gib": round(max(planned) / GIB, 3),
        "dry_run_gib": round(max(measured) / GIB, 3),
        "error": round(max(planned) / max(measured) - 1, 4),
        "states_error": round(max(states, key=abs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="Part of the layouts to run, as 1/4.")
    parser.add_argument("--out", type=Path, help="Output CSV file.")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in list(layouts())[part - 1 :: parts]:
            start = time.perf_counter()
            model = write_config_json(shape_of(name), Path(folder) / name)
            row = compare(name, layout, model)
            rows.append(row)
            seconds = time.perf_counter() - start
            print(*row.values(), f"{seconds:.1f} s", flush=True)
            if arguments.out:
                with arguments.out.open("w", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= 0.05 for error in errors)
    print(
        f"{len(rows)} layouts, {within} within 5%, median {errors[len(errors) // 2]:.4f}, worst "
        f"{errors[-1]:.4f}; states {max(abs(row['states_error']) for row in rows):.4f}",
        file=sys.stdout,
    )


if __name__ == "__main__":
    main()
