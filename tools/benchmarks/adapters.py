"""Weight pushes of a model with adapters, merged and as adapters alone, next to each other.

    python -m tools.benchmarks.adapters --hidden 512 --layers 8 --rank 16 --repeats 5

One process with the real vLLM on a CPU, a random Qwen2 in float32, and both engines. Prints the
bytes of a push and median seconds of both kinds, and the ratios merged / adapters, also of the
seconds of generation, for which vLLM on a CPU gathers the factors of every token.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron_rl.types import Prompt, SamplingSettings
from tests.ranks import run_ranks

TARGETS = ("qkv", "proj", "fc1", "fc2")


def save_model(folder: Path, *, hidden: int, layers: int) -> None:
    """Write a random model in float32."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
        max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2,
        architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )


def measure(rank: int, world_size: int, folder: str, lora_rank: int, repeats: int) -> str:
    """Push in turn to both engines; return JSON of the medians."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.groups import initialise
    from megatron_rl.actor.settings import ActorSettings, LoraSettings
    from megatron_rl.engine.adapters import AdapterSettings
    from megatron_rl.engine.vllm_engine import VllmEngine

    lora = LoraSettings(lora_rank, 2.0 * lora_rank, TARGETS)
    actor = MegatronActor(folder, topology=initialise(), settings=ActorSettings(lora=lora))
    engines: dict[str, Any] = {
        name: VllmEngine(
            folder, tensor=1, topology=actor.topology, dtype=torch.float32, max_model_len=256,
            kv_cache_bytes=64 << 20, adapters=adapters,
        )
        for name, adapters in (
            ("merged", None), ("adapters", AdapterSettings(lora_rank, lora.scale, TARGETS)),
        )
    }  # fmt: skip
    prompts = [Prompt(i, (), tuple(range(3, 35)), "", "") for i in range(8)]
    sampling = SamplingSettings(1.0, 1.0, 32, 0)
    seconds: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            stats = engine.sync_weights(actor, version=repeat)
            start = time.perf_counter()
            engine.generate(prompts, samples=1, sampling=sampling)
            if repeat:  # the first push sends the base weights
                seconds.setdefault(f"{name} push", []).append(stats.seconds)
                seconds.setdefault(f"{name} generate", []).append(time.perf_counter() - start)
                found[f"{name} bytes"] = stats.bytes_sent + stats.bytes_local
            else:
                found[f"{name} first push"] = stats.seconds
    return json.dumps(found | {name: statistics.median(each) for name, each in seconds.items()})


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 512), ("layers", 8), ("rank", 16), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), hidden=options.hidden, layers=options.layers)
        (text,) = run_ranks(measure, 1, folder, options.rank, options.repeats)
    found = json.loads(text)
    for kind in ("bytes", "push", "first push", "generate"):
        merged, adapters = found[f"merged {kind}"], found[f"adapters {kind}"]
        print(f"{kind:<12}merged {merged:.4g}   adapters {adapters:.4g}   {merged / adapters:.3g}")


if __name__ == "__main__":
    main()
