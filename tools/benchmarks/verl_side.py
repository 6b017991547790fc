"""verl's part of the comparison on a GPU (tools/gpu_check, row `peers`).

    python tools/benchmarks/verl_side.py install     # verl, torch and vLLM into .cache/verl

verl pins another torch, vLLM and transformers than this project, so it has an environment of its
own. It runs on CUDA alone: its engines are vLLM servers with a GPU each.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERL = ROOT / ".cache" / "verl"
RELEASE = "verl[vllm]==0.9.1"
PYTHONS = ((3, 10), (3, 13))  # from, below


class CannotInstallError(RuntimeError):
    """verl cannot be installed on this machine."""


def install() -> None:
    """Install verl into an environment of its own; CannotInstallError gives pip's reason."""
    first, below = PYTHONS
    if not first <= sys.version_info[:2] < below:
        raise CannotInstallError(f"{RELEASE} needs a Python from 3.10 to 3.12, not {sys.version}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VERL)], check=True)
    pip = [str(VERL / "bin" / "python"), "-m", "pip", "install", "--quiet", RELEASE]
    done = subprocess.run(pip, check=False, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        (VERL / "bin" / "python").unlink()
        raise CannotInstallError(f"pip cannot install {RELEASE}: {(errors or ['?'])[-1]}")


def missing(*, on_cuda: bool) -> str | None:
    """Explain why verl cannot run here, if so."""
    if not on_cuda:
        return "verl needs CUDA"
    if not (VERL / "bin" / "python").exists():
        return "verl is not installed: python tools/benchmarks/verl_side.py install"
    return None


def overrides(task: Path, settings: dict) -> list[str]:
    """Settings of verl for the same run on one device: see `against_trl.run_trl`."""
    tokens = 48 + settings["tokens"]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/train.parquet",
        "data.val_max_samples=8",
        f"data.train_batch_size={settings['prompts']}",
        "data.max_prompt_length=48",
        f"data.max_response_length={settings['tokens']}",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"{actor}.ppo_mini_batch_size={settings['prompts'] // settings['minibatches']}",
        f"{actor}.ppo_epochs={settings['epochs']}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={max(16384, 2 * tokens)}",
        f"{actor}.use_kl_loss=false",
        f"{actor}.policy_loss.loss_mode=gspo",
        f"{actor}.clip_ratio_low=0.02",
        f"{actor}.clip_ratio_high=0.02",
        f"{actor}.optim.lr=2e-4",
        f"{rollout}.name=vllm",
        f"{rollout}.n={settings['samples']}",
        f"{rollout}.temperature=1.0",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{rollout}.log_prob_max_token_len_per_gpu={max(16384, 2 * tokens)}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"reward.custom_reward_function.name={'parity' if settings['parity'] else 'is_right'}",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={settings['batches']}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
    ]


def parity(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return whether the response's length is odd, as `against_trl.score`."""
    return float(len(solution_str) % 2)


def is_right(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return whether the response has the answer, as in `trl_side.py`."""
    return float("\\boxed{" + ground_truth + "}" in solution_str)


def run(task: Path, settings: dict) -> dict:
    """Train; return the phases of each rollout batch and the peak memory, as `run_trl`."""
    from tools.benchmarks.against_trl import run_watched

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        command = [str(VERL / "bin" / "python"), "-m", "verl.trainer.main_ppo"]
        command += [*overrides(task, settings), f"trainer.default_local_dir={folder}"]
        _, peak = run_watched(command, environment={"VERL_FILE_LOGGER_PATH": str(file)})
        return {"rows": read_rows(file), "peak_gib": peak}


def read_rows(file: Path) -> list[dict[str, float]]:
    """Read verl's log: a line for each step, with its metrics in `data`."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)["data"]
        if "timing_s/step" in data:
            rows.append({
                "seconds": data["timing_s/step"],
                "generate": data["timing_s/gen"],
                "logprobs": data.get("timing_s/old_log_prob", 0.0),
                "train": data["timing_s/update_actor"],
                "reward": data["critic/score/mean"],
                "tokens": data["response_length/mean"],
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    install()
