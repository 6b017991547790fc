"""TRL's side of `against_trl.py`, run by the Python of TRL's environment.

trl_side.py TASK SETTINGS      prints `BATCH {...}` for every rollout batch with its updates
"""

import json
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Train; an update of TRL's is a minibatch here, an iteration an epoch."""
    task, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    updates = settings["epochs"] * settings["minibatches"]  # of a rollout batch
    batch = settings["prompts"] * settings["samples"] // settings["minibatches"]
    seen: dict[str, list[float]] = {"reward": [], "tokens": []}
    spent = {"generate": 0.0, "logprobs": 0.0}

    def reward(completions, reward_model, completion_ids, **_):
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        answers = ["\\boxed{" + one["ground_truth"] + "}" for one in reward_model]
        pairs = zip(texts, answers, strict=True)
        right = [len(t) % 2 if settings["parity"] else answer in t for t, answer in pairs]
        seen["reward"] += map(float, right)
        seen["tokens"] += map(len, completion_ids)
        return [float(one) for one in right]

    class Trainer(GRPOTrainer):
        """Adds up the seconds of generating, and of what follows it before the updates."""

        def _generate(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            spent["generate"] += time.perf_counter() - start
            return result

        def _generate_and_score_completions(self, *args, **kwargs):
            start, generated = time.perf_counter(), spent["generate"]
            result = super()._generate_and_score_completions(*args, **kwargs)
            generated = spent["generate"] - generated
            spent["logprobs"] += time.perf_counter() - start - generated
            return result

    class Clock(TrainerCallback):
        """Prints a line when the last update of a rollout batch is done."""

        def on_train_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, arguments, state, control, **kwargs):
            if state.global_step % updates:
                return
            now = time.perf_counter()
            means = {key: sum(values) / len(values) for key, values in seen.items()}
            row = {"seconds": now - self.start, **spent, **means}
            row["train"] = row["seconds"] - row["generate"] - row["logprobs"]
            print("\nBATCH " + json.dumps(row), flush=True)
            seen.update(reward=[], tokens=[])
            spent.update(generate=0.0, logprobs=0.0)
            self.start = time.perf_counter()

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.padding_side = "left"
    data = load_dataset("parquet", data_files=str(task / "train.parquet"), split="train")
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32),
            reward_funcs=reward,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=batch,
                steps_per_generation=settings["minibatches"],
                num_iterations=settings["epochs"],
                num_generations=settings["samples"],
                max_completion_length=settings["tokens"],
                max_steps=updates * settings["batches"],
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
                importance_sampling_level="sequence",
                epsilon=0.02,
                learning_rate=2e-4,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                logging_steps=updates,
            ),
        ).train()


if __name__ == "__main__":
    main()
