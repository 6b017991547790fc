"""Train in small layouts at another commit and at this one; compare every metric and weight.

    python -m tools.compare_commits 4c2004c [--only cp2 dp2] [--folder FOLDER]

For a change that should not change any number: metrics that both have, other than times and sizes,
and the trained weights must be equal bit for bit; the exit code is 1 if some are not, or if a run
fails. The tiny task and models with random weights, real Megatron-core and vLLM on this CPU, three
steps of two epochs and two minibatches each; half a minute to a minute for a layout. The other
commit runs in a git worktree with this environment, so its dependencies must be the same, and its
config must have these settings.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.runs.files import read_metrics
from tests.functional.test_train_layouts import EXPERTS, make_model
from tests.functional.tiny_runs import PLACES, make_task

ROOT = Path(__file__).parents[1]
COMMON = (
    "eval.sets={}", "logging.tensorboard=false", "rollout.prompts_per_step=8",
    "rollout.responses_per_prompt=4", "trainer.steps=3", "trainer.epochs=2",
    "trainer.minibatches=2", "parallel.context=1",
)  # fmt: skip
# A random model earns no reward: entropy alone moves it.
UNREWARDED = (
    "objective.name=grpo", "objective.entropy_coefficient=1.0e-2", "optimizer.learning_rate=1e-2",
    "optimizer.warmup_steps=0",
)  # fmt: skip
KL = "objective.kl={estimator: k3, coefficient: 0.1}"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("Qwen3Moe", EXPERTS), "4 layers": ("Qwen2", {"num_hidden_layers": 4}),
}  # fmt: skip
# Settings below `parallel`, or others with their section; a model, if not the tiny task's.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp1": (),
    "dp2": ("data=2",),
    "cp2": ("context=2",),
    "cp4": ("context=4",),
    "tp2": ("tensor=2",),
    "tp2, engines of 2": ("tensor=2", "rollout.tensor=2"),
    "tp2, recompute": ("tensor=2", "trainer.recompute=full"),
    "pp2": ("pipeline=2",),
    "pp2, 2 virtual": ("4 layers", "pipeline=2", "virtual_stages=2"),
    "dp2 cp2": ("data=2", "context=2"),
    "tp2 cp2": ("tensor=2", "context=2"),
    "tp2 pp2": ("tensor=2", "pipeline=2"),
    "pp2 cp2": ("pipeline=2", "context=2"),
    "tp2 pp2 cp2": ("tensor=2", "pipeline=2", "context=2"),
    "experts": ("experts",),
    "experts, dp2 ep2": ("experts", "data=2", "expert=2"),
    "experts, cp2 ep2": ("experts", "context=2", "expert=2"),
    "experts, dp2 pp2 ep2": ("experts", "data=2", "pipeline=2", "expert=2"),
    "cp2, GRPO with KL": ("context=2", "objective.name=grpo", KL),
    "dp2, GSPO": ("data=2", "objective.name=gspo"),
    "dp1, lag of one step": ("lag.batches=1",),
    "cp2, bfloat16": ("context=2", "trainer.dtype=bfloat16"),
}
# Of the clock, the host's memory or its processor.
MEASURED = ("time/", "memory/", "seconds", "throughput", "per_second", "mfu", "imbalance", "bytes")


def overrides(name: str, models: Path) -> Iterator[str]:
    """Yield the settings of a layout; makes its model below `models`."""
    yield from (*PLACES, *COMMON, "reward.verifier=null")  # that of the tests may be newer
    for setting in LAYOUTS[name]:
        if setting in MODELS:
            family, sizes = MODELS[setting]
            if not (models / setting).exists():
                make_model(models / setting, family, **sizes)
            yield from (f"model.path={models / setting}", *UNREWARDED)
        elif "." in setting.partition("=")[0]:
            yield setting
        else:
            yield f"parallel.{setting}"


def train(tree: Path, settings: list[str], run: Path) -> str | None:
    """Train with the code of a checkout; the end of its output if that fails."""
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config",
               "examples/pnpo/quickstart.yaml", *settings, f"run.dir={run.parent}",
               f"run.name={run.name}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        check=False,
        cwd=tree,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    return (done.stdout + done.stderr)[-2000:] if done.returncode else None


def compare(before: Path, now: Path) -> tuple[bool, str]:
    """Return whether two runs are equal, and how they differ."""
    equal, different, alone = 0, set[str](), set[str]()
    rows = read_metrics(before), read_metrics(now)
    for one, other in zip(*rows, strict=True):
        alone |= one.keys() ^ other.keys()
        for name in one.keys() & other.keys():
            if any(part in name for part in MEASURED):
                continue
            if repr(one[name]) == repr(other[name]):  # nan is equal to itself
                equal += 1
            else:
                different.add(name)
    weights = [_weights(run) for run in (before, now)]
    moved = max(row.get("grad/norm", 0.0) for row in rows[1])
    parts = [f"{equal:,} metrics equal", f"largest gradient norm {moved:.2g}"]
    parts += [f"DIFFERENT: {' '.join(sorted(different))}"] if different else []
    parts += [f"only in one: {' '.join(sorted(alone))}"] if alone else []
    parts += [f"weights {'equal' if weights[0] == weights[1] else 'DIFFERENT'}"]
    return not different and weights[0] == weights[1], "; ".join(parts)


def _weights(run: Path) -> list[str]:
    files = sorted((run / "model").glob("*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def main() -> None:
    """Compare the layouts named on the command line, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="Commit to compare this checkout with.")
    parser.add_argument("--only", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS),
                        metavar="LAYOUT")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="For runs; by default a temporary one.")
    arguments = parser.parse_args()
    if arguments.folder and arguments.folder.exists():
        parser.error(f"--folder {arguments.folder} exists; name a new one")
    git, all_equal = ["git", "-C", str(ROOT)], True
    known = subprocess.run([*git, "cat-file", "-e", f"{arguments.commit}^{{commit}}"],
                           check=False, capture_output=True)  # fmt: skip
    if known.returncode:
        parser.error(f"git knows no commit {arguments.commit}; fetch it, or name another")
    make_task()
    with tempfile.TemporaryDirectory() as temporary:
        folder, tree = arguments.folder or Path(temporary), Path(temporary) / "tree"
        add = [*git, "worktree", "add", "--quiet", "--detach", str(tree), arguments.commit]
        subprocess.run(add, check=True)
        try:
            for number, name in enumerate(arguments.only):
                settings = list(overrides(name, folder / "models"))
                runs = folder / f"{number}" / "before", folder / f"{number}" / "now"
                failed = [train(*each) for each in ((tree, settings, runs[0]),
                                                    (ROOT, settings, runs[1]))]  # fmt: skip
                text = next(filter(None, failed), None)
                is_equal, text = (False, f"FAILED\n{text}") if text else compare(*runs)
                all_equal &= is_equal
                print(f"{name}: {text}", flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    sys.exit(not all_equal)


if __name__ == "__main__":
    main()
