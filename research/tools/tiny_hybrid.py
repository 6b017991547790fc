"""Make the quickstart's task with a tiny Qwen3.5: three gated delta nets and one full attention.

    python -m research.tools.tiny_hybrid --output .cache/tiny_hybrid
    megatron-rl train examples/pnpo/quickstart.yaml model.path=.cache/tiny_hybrid/model \\
        data.train=.cache/tiny_hybrid/train.parquet \\
        'eval.sets={heldout: .cache/tiny_hybrid/heldout.parquet}'

The model is fine-tuned on worked solutions as the quickstart's own is, with transformers.
"""

import argparse
import dataclasses
import sys
import time
from functools import partial
from pathlib import Path

from megatron_rl.apps.tasks import tiny_task
from research.tasks.tiny_model import FineTuningSettings, measure_accuracy, train_model

SETTINGS = FineTuningSettings(heads=2, longest_warm_up=4000)


def build_model(tokenizer, max_length: int):
    """Build a randomly initialized Qwen3.5 of the size of the quickstart's model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = tiny_task.model_sizes(SETTINGS, tokenizer, max_length)
    config = Qwen3_5TextConfig(
        **sizes | {"num_hidden_layers": 4},
        head_dim=SETTINGS.hidden // SETTINGS.heads,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return Qwen3_5ForCausalLM(config)


def make(folder: Path) -> dict:
    """Write data and model into `folder`; return the measurements."""
    import torch

    start = time.monotonic()
    torch.manual_seed(SETTINGS.seed)
    torch.set_num_threads(1)
    heldout = tiny_task.write_problems(folder, SETTINGS)
    max_length = 8 * SETTINGS.longest + 48
    tokenizer = tiny_task.build_tokenizer(max_length)
    model = build_model(tokenizer, max_length)
    updates = train_model(model, tokenizer, SETTINGS)
    model.eval()
    accuracy = measure_accuracy(model, tokenizer, heldout, SETTINGS)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "updates": updates,
        "accuracy": round(accuracy, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(".cache/tiny_hybrid"))
    output = parser.parse_args().output
    stamp = {"settings": dataclasses.asdict(SETTINGS), "model": "Qwen3.5"}
    summary = "tiny hybrid: {parameters:,} parameters right in {accuracy:.0%} of its answers"
    try:
        tiny_task.make_folder_once(output, stamp, make, summary, partial(print, flush=True))
    except ValueError as error:
        sys.exit(f"tiny_hybrid: {error}")


if __name__ == "__main__":
    main()
