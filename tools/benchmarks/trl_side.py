"""TRL's part of `against_trl.py`, run in TRL's environment.

trl_side.py TASK SETTINGS      prints `BATCH {...}` for every rollout batch with its updates
"""

import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Callback that prints a line after the last update of a rollout batch."""

    def __init__(self, updates: int, score: Callable[[str, str], float]) -> None:
        self.updates = updates
        self.score = score  # of a response and the true answer
        self._begin()

    def _begin(self) -> None:
        self.start = time.perf_counter()
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.generate = self.logprobs = 0.0  # seconds

    def reward(self, completions, reward_model, completion_ids, **_):
        """Return the rewards and record them."""
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        truths = [one["ground_truth"] for one in reward_model]
        right = list(map(self.score, texts, truths))
        self.rewards += right
        self.lengths += map(len, completion_ids)
        return right

    def on_train_begin(self, *args, **kwargs):
        self._begin()

    def on_step_end(self, arguments, state, control, **kwargs):
        if state.global_step % self.updates:
            return
        seconds = time.perf_counter() - self.start
        row = {
            "seconds": seconds,
            "generate": self.generate,
            "logprobs": self.logprobs,
            "train": seconds - self.generate - self.logprobs,
            "reward": sum(self.rewards) / len(self.rewards),
            "tokens": sum(self.lengths) / len(self.lengths),
        }
        print("\nBATCH " + json.dumps(row), flush=True)
        self._begin()


class Trainer(GRPOTrainer):
    """Trainer that measures the seconds of generation and of the log-probs."""

    clock: Clock

    def _generate(self, *args, **kwargs):
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.clock.generate += time.perf_counter() - start
        return result

    def _generate_and_score_completions(self, *args, **kwargs):
        start, generated = time.perf_counter(), self.clock.generate
        result = super()._generate_and_score_completions(*args, **kwargs)
        generated = self.clock.generate - generated
        self.clock.logprobs += time.perf_counter() - start - generated
        return result


def choose_score(settings: dict) -> Callable[[str, str], float]:
    """Return the reward: the parity of the length, a user's function, or the boxed answer."""
    if settings["parity"]:
        return lambda text, truth: float(len(text) % 2)
    if settings["reward"]:
        function = runpy.run_path(settings["reward"])["score"]
        return lambda text, truth: function(text, truth, "")
    return lambda text, truth: float("\\boxed{" + truth + "}" in text)


def make_arguments(settings: dict, *, updates: int, folder: str) -> GRPOConfig:
    """Return TRL's settings for the same run."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=settings["prompts"]
        * settings["samples"]
        // settings["minibatches"],
        steps_per_generation=settings["minibatches"],
        num_iterations=settings["epochs"],
        num_generations=settings["samples"],
        max_completion_length=settings["tokens"],
        max_steps=updates * settings["batches"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence" if settings["sequences"] else "token",
        epsilon=0.02 if settings["sequences"] else 0.2,
        learning_rate=settings["rate"],
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available() or settings.get("bfloat16", False),
        use_vllm=torch.cuda.is_available(),  # on a GPU in the trainer's process, as here
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        report_to=[],
        save_strategy="no",
        logging_steps=updates,
    )


def main() -> None:
    """Train; TRL's updates are minibatches here, and its iterations are epochs."""
    task, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(settings["threads"])
    updates = settings["epochs"] * settings["minibatches"]  # of a rollout batch
    clock = Clock(updates, choose_score(settings))
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.padding_side = "left"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32),
            reward_funcs=clock.reward,
            train_dataset=load_dataset(
                "parquet", data_files=str(task / "train.parquet"), split="train"
            ),
            processing_class=tokenizer,
            callbacks=[clock],
            args=make_arguments(settings, updates=updates, folder=folder),
        )
        trainer.clock = clock
        trainer.train()


if __name__ == "__main__":
    main()
