"""Compare the planner's memory with rehearsals of the real actor, on a few hundred layouts.

    python tools/compare_plan.py --part 1/4 --out /tmp/plan-1.csv

Models keep the widths of real ones and have 8 layers, so that a rehearsal takes seconds. For each
layout the first and the last stage are rehearsed, and the larger of the two is what is compared:
states, and the peak of an update. Prints a line for each, then the worst errors.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, parse_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.built_in import MODELS
from megatron_rl.planning.footprint import activation_bytes, prepared_pack_bytes, state_bytes
from megatron_rl.planning.parts import Parts

GIB = 2**30
NAMES = ("DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B")
LAYERS, EXPERTS = 8, 32  # of the models that are rehearsed
LAYOUTS = [  # tensor, pipeline, context, data
    (1, 1, 1, 8), (2, 1, 1, 4), (1, 1, 2, 4), (1, 1, 4, 2), (2, 1, 2, 2), (4, 1, 1, 2),
    (1, 2, 1, 4), (2, 2, 1, 4), (1, 2, 2, 4), (2, 2, 2, 4), (1, 4, 1, 4), (1, 4, 2, 8),
    (2, 4, 2, 2), (4, 2, 2, 4),
]  # fmt: skip
PROMPT, RESPONSE = 1024, 15360


def layouts() -> Iterator[tuple[str, Parts]]:
    """What is rehearsed."""
    variants = [(16384, "none"), (16384, "selective"), (16384, "full"), (32768, "none")]
    for name, sizes, (tokens, recompute) in itertools.product(NAMES, LAYOUTS, variants):
        shape = shape_of(name)
        tensor, pipeline, context, data = sizes
        if shape.num_query_groups % tensor or (shape.experts and recompute == "selective"):
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
                    recompute=recompute,
                    tokens=tokens,
                ),
            )


def shape_of(name: str) -> ModelShape:
    """A model's widths, few layers and experts."""
    shape = replace(MODELS[name], num_layers=LAYERS)
    if shape.experts is not None:
        shape = replace(shape, experts=replace(shape.experts, num_experts=EXPERTS))
    return shape


def write_model(shape: ModelShape, folder: Path) -> Path:
    """A folder with the config.json of a shape."""
    values: dict[str, Any] = {
        "architectures": [shape.architecture],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rotary_base,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    if shape.experts is not None:
        values |= {
            "num_experts": shape.experts.num_experts,
            "num_experts_per_tok": shape.experts.experts_per_token,
            "moe_intermediate_size": shape.experts.ffn_hidden_size,
            "norm_topk_prob": shape.experts.normalize_top_k,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def config_for(parts: Parts, model: Path) -> Config:
    """A run of this layout."""
    return parse_config(
        {
            "model": {"path": str(model)},
            "data": {"train": "none.parquet", "max_prompt_tokens": PROMPT},
            "parallel": {
                "tensor": parts.tensor,
                "pipeline": parts.pipeline,
                "context": parts.context,
                "expert": parts.expert,
            },
            "rollout": {"max_response_tokens": RESPONSE},
            "trainer": {
                "recompute": parts.recompute,
                "tokens_per_micro_batch": parts.tokens,
            },
        }
    )


def compare(name: str, parts: Parts, model: Path) -> dict[str, Any]:
    """Bytes by formula and by rehearsal; the larger of the first and the last stage."""
    from megatron_rl.planning.rehearsal import rehearse

    shape = shape_of(name)
    planned, rehearsed, states = [], [], []
    for stage in sorted({0, parts.pipeline - 1}):
        found = rehearse(
            config_for(parts, model),
            processes=parts.world_size,
            rank=stage * parts.world_size // parts.pipeline,
        )
        awake, _ = state_bytes(shape, parts, stage=stage)
        kept = activation_bytes(
            shape,
            parts,
            stage=stage,
            micro_batches=found.micro_batches,
            prompt_part=PROMPT / (PROMPT + RESPONSE),
        )
        packs = found.micro_batches * prepared_pack_bytes(shape, parts)
        planned.append(awake + kept + packs)
        rehearsed.append(found.phases["update"].peak)
        held = sum(size for key, size in found.states.items() if key != "activations")
        states.append(awake / held - 1)
    return {
        "model": name,
        "layout": str(parts),
        "planned_gib": round(max(planned) / GIB, 3),
        "rehearsed_gib": round(max(rehearsed) / GIB, 3),
        "error": round(max(planned) / max(rehearsed) - 1, 4),
        "states_error": round(max(states, key=abs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="which part of the layouts, as 1/4")
    parser.add_argument("--out", type=Path, help="CSV of the comparison")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in list(layouts())[part - 1 :: parts]:
            start = time.perf_counter()
            model = write_model(shape_of(name), Path(folder) / name)
            row = compare(name, layout, model)
            rows.append(row)
            seconds = time.perf_counter() - start
            print(*row.values(), f"{seconds:.1f} s", flush=True)
            if arguments.out:
                with arguments.out.open("w") as file:
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
