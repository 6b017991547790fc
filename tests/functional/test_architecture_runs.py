"""Two steps of training in bfloat16 with vLLM, of each architecture with parts of its own."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_architectures import _save_model
from tests.functional.tiny_runs import TASK, TRAIN, make_task, train
from tests.published_form import load_model

FURTHER = ("model.visual.", "mtp.")  # not part of the text model
SETTINGS = (
    "trainer.dtype=bfloat16", "reward.verifier=tests.functional.sums:parity",
    "rollout.prompts_per_step=2", "rollout.responses_per_prompt=4", "trainer.steps=2",
    "rollout.max_response_tokens=16", "trainer.epochs=2", "trainer.minibatches=1",
    "trainer.checkpoint_every=2", "parallel.context=1", "eval.sets={}", "rollout.kv_cache_mib=32",
    "logging.tensorboard=false", "optimizer.decay=constant", "optimizer.learning_rate=1.0e-2",
    "optimizer.warmup_steps=0",
    # Without it the second step trains nothing if all its responses earn the same.
    "objective.entropy_coefficient=1.0e-2",
)  # fmt: skip


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("DeepseekV3", "GptOss")]


@pytest.mark.parametrize("name", ["Qwen3_5Moe published", *SLOW])
def test_training_in_bfloat16_moves_every_weight(name, tmp_path):
    make_task()
    folder = tmp_path / "model"
    _save_model(name, folder)
    (weights,) = folder.glob("*.safetensors")
    shutil.copytree(TASK / "model", folder, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))  # fmt: skip
    shutil.copy(TASK / "model" / "tokenizer_config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["eos_token_id"] = json.loads((TASK / "model" / "config.json").read_text())["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    places = (f"model.path={folder}", f"data.train={TRAIN}")
    rows = train(*SETTINGS, f"run.dir={tmp_path}", "run.name=run", places=places)[1:]
    assert [row["ratio/first_minibatch_max_deviation"] for row in rows] == [0.0, 0.0]
    # A push that leaves a part behind would show here after four updates of 1e-2.
    assert all(row["mismatch/logprob_abs_diff_mean"] < 0.1 for row in rows)
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    before = load_file(weights)
    assert trained.keys() == before.keys()
    for key, tensor in trained.items():
        is_constant = key.endswith("e_score_correction_bias") or key.startswith(FURTHER)
        assert torch.equal(tensor, before[key].to(tensor.dtype)) == is_constant, key
    if name.endswith(" published"):
        tower = load_model(tmp_path / "run" / "model").model.visual.state_dict()
        assert all(torch.equal(tower[key], before[f"model.visual.{key}"]) for key in tower)
