"""One training step with the shape of Qwen2.5-0.5B on a CPU, with Megatron-core and vLLM.

    python tools/true_shape_step.py [--folder FOLDER]

Uses random weights, a few short responses to the tiny task's prompts, and one process. Prints the
peak memory of each phase. Requires 18 GiB of available memory, which is checked first.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TASK = ROOT / ".cache" / "tiny_task"
# config.json of Qwen/Qwen2.5-0.5B on the Hugging Face hub
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = (
    "parallel.context=1", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=4",
    "rollout.max_response_tokens=32", "rollout.max_num_seqs=16", "rollout.kv_cache_mib=64",
    "trainer.steps=1", "trainer.epochs=1", "trainer.minibatches=1", "eval.sets={}",
    "trainer.tokens_per_micro_batch=1024", "logging.tensorboard=false",
    "objective.entropy_coefficient=1.0e-2", "optimizer.warmup_steps=0",
)  # fmt: skip
NEEDS_GIB = 18


def make_model(folder):
    """Write a model with this shape, random weights and the tiny task's tokenizer."""
    import torch
    from safetensors.torch import save_file

    from megatron_rl.models.shape import read_model_shape, tensor_shapes

    shutil.copytree(TASK / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = {key: made[key] for key in ("eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(SHAPE | ends), encoding="utf-8")
    torch.manual_seed(0)
    weights = {}
    for name, size in tensor_shapes(read_model_shape(folder)).items():
        made = torch.randn(size, dtype=torch.bfloat16).mul_(0.02)
        weights[name] = made + 1 if name.endswith("norm.weight") else made
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def available_gib():
    """Return the memory that is available without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/meminfo does not contain the available memory")


def main():
    """Create the model, train one step and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="Folder for the model and the run.")
    folder = parser.parse_args().folder
    if (free := available_gib()) < NEEDS_GIB:
        sys.exit(
            f"{free:.1f} GiB of memory are available; this needs {NEEDS_GIB} GiB: stop other "
            "processes"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch)
        subprocess.run(
            [sys.executable, "-m", "megatron_rl.apps.tasks.tiny_task", "--output", str(TASK)],
            cwd=ROOT,
            check=True,
        )
        print(f"{make_model(folder / 'model'):,} parameters", flush=True)
        command = [
            sys.executable, "-m", "megatron_rl.cli", "train", "--config",
            "examples/pnpo/quickstart.yaml", f"model.path={folder}/model",
            f"data.train={TASK}/train.parquet", f"run.dir={folder}", "run.name=true_shape",
        ]  # fmt: skip
        subprocess.run([*command, *SETTINGS], cwd=ROOT, check=True)
        from megatron_rl.runs.rows import read_metrics

        step = read_metrics(folder / "true_shape")[-1]
        for name, value in step.items():
            if name.startswith(
                ("memory/", "time/", "ratio/first", "mismatch/logprob_abs_diff_mean")
            ):
                print(f"{name:<40} {value:.6g}")


if __name__ == "__main__":
    main()
