"""Whole runs under layouts that the quickstart does not use, with real Megatron and real vLLM."""

import json
import shutil

import pytest
import torch

from tests.functional.tiny_runs import TASK, make_task, train

TINY = (
    "rollout.prompts_per_step=8", "rollout.responses_per_prompt=2",
    "rollout.max_response_tokens=16",
    "trainer.steps=2", "trainer.epochs=1", "trainer.minibatches=2", "eval.sets={}",
    "logging.tensorboard=false", "parallel.context=1", "objective.name=grpo",
    # A random model earns no reward: entropy alone moves it.
    "objective.entropy_coefficient=1.0e-2", "optimizer.learning_rate=1e-2",
    "optimizer.warmup_steps=0",
)  # fmt: skip


def make_model(folder, name, **sizes):
    """A random model for the tiny task's tokenizer, whose every weight matters."""
    import transformers

    make_task()
    shutil.copytree(TASK / "model", folder)
    made = json.loads((folder / "config.json").read_text())
    keep = ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")
    config = getattr(transformers, f"{name}Config")(
        **{key: made[key] for key in keep},
        **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, **sizes},
        intermediate_size=96,
        tie_word_embeddings=False,
        architectures=[f"{name}ForCausalLM"],
    )
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.1 * noise)
    model.save_pretrained(folder)


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "num_hidden_layers": 2, "head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "layout"),
    [
        # One micro-batch is enough for a minibatch here, and for the comparison with the engine;
        # interleaved stages need two.
        ("Qwen2", {"num_hidden_layers": 4}, ("parallel.pipeline=2", "parallel.virtual_stages=2")),
        ("Qwen3Moe", EXPERTS, ("parallel.data=2", "parallel.expert=2")),
    ],
    ids=["pp2-virtual2", "dp2-ep2"],
)
def test_layout_trains_with_fresh_weights(tmp_path, name, sizes, layout):
    make_model(tmp_path / "model", name, **sizes)
    rows = train(
        f"run.dir={tmp_path}", "run.name=a", f"model.path={tmp_path}/model", *TINY, *layout
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["ratio/first_minibatch_max_deviation"] == 0.0
        assert row["rollout/weight_version"] == row["step"] - 1
        # Float32 in two implementations; step 2's engine has the weights of step 1's updates, each
        # of which moved log-probs by far more.
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-5
        assert row["ratio/max_deviation"] > 1e-3
