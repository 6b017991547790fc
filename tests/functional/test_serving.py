"""A trained folder is served by vLLM itself, whose tokens are those that training reads."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.data.tokenizer import load_tokenizer
from tests.functional.tiny_runs import CUT, TASK, make_task, train

pytestmark = pytest.mark.slow
TEXTS = ["1 + 2 - 3 modulo 10.\n", "Work out 4 + 4.", " 7  8\n\n9<|im_end|>"]
# In a process of its own, as `vllm serve` starts it: without this package.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
folder, texts = json.loads(sys.argv[1])
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=96,
          kv_cache_memory_bytes=2**26)
tokenizer = llm.get_tokenizer()
tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
answers = llm.generate([{"prompt_token_ids": ids} for ids in tokens], SamplingParams(
    temperature=0, max_tokens=8, ignore_eos=True))
print("FOUND", json.dumps([tokens, [list(one.outputs[0].token_ids) for one in answers]]))
"""


def test_vllm_serves_a_trained_folder_with_the_tokens_of_training(tmp_path):
    make_task()
    train(*CUT, "trainer.steps=1", "trainer.epochs=1", "trainer.minibatches=1", "eval.sets={}",
          "rollout.prompts_per_step=8", "rollout.responses_per_prompt=4",
          f"run.dir={tmp_path}", "run.name=run")  # fmt: skip
    folder = tmp_path / "run" / "model"
    words = json.dumps([str(folder), TEXTS])
    command = [sys.executable, "-c", SERVE, words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    tokens, answers = json.loads(line.removeprefix("FOUND "))
    own = load_tokenizer(TASK / "model")
    assert tokens == [own.encode(text, add_special_tokens=False) for text in TEXTS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for ids, answer in zip(tokens, answers, strict=True):
        logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert torch.allclose(chosen, logits.max(1).values, atol=1e-4)  # up to ties
