"""TRL's part of `shared_prompts.py`, run in TRL's environment.

trl_passes.py MODEL TEXTS REPEATS      prints {"seconds", "MiB", "rows"} as JSON

TEXTS is a JSON file: for each sequence the tokens of its prompt, and those behind it. TRL's trainer
computes their log-probs, then its loss and the gradient.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


def build_trainer(folder: str, model: str, sequences: int) -> GRPOTrainer:
    """Build a trainer of one device, whose data are not used."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        ),
        args=GRPOConfig(
            output_dir=folder, per_device_train_batch_size=sequences, num_generations=sequences,
            beta=0.0, loss_type="grpo", gradient_checkpointing=False, use_cpu=True, bf16=False,
            report_to=[], save_strategy="no",
        ),
    )  # fmt: skip


def main() -> None:
    """Run the passes several times and print the fastest."""
    model, texts, repeats = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
    torch.set_num_threads(1)
    prompts, completions = zip(*texts, strict=True)

    def table(rows: tuple[list[int], ...], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        each = [torch.tensor(row) for row in rows]
        return pad(each, 0, side), pad([torch.ones_like(row) for row in each], 0, side)

    inputs = {"advantages": torch.linspace(-1, 1, len(texts))}
    inputs["prompt_ids"], inputs["prompt_mask"] = table(prompts, "left")
    inputs["completion_ids"], inputs["completion_mask"] = table(completions, "right")
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), dim=1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), dim=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder, model, len(texts))
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        before, best = _memory(), float("inf")
        for _ in range(int(repeats)):
            start = time.process_time()
            with torch.no_grad():
                inputs["old_per_token_logps"], *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, inputs["completion_ids"].shape[1]
                )
            trainer.compute_loss(trainer.model, inputs).backward()
            best = min(best, time.process_time() - start)
    print("\n" + json.dumps({"seconds": best, "MiB": _memory() - before, "rows": ids.numel()}))


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
