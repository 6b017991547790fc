"""Big examples train for one step as shrunken models, cut as their configs cut the true ones."""

import pytest

from megatron_rl.config import load_config
from tests.functional.test_train_layouts import make_model
from tests.functional.tiny_runs import PLACES, ROOT, TRAIN, train

EXAMPLES = ROOT / "examples" / "pnpo"
# name: model, its sizes, processes. Data parallelism is as small as the layout allows.
SHRUNKEN = {
    "qwen2_5_7b": ("Qwen2", {"num_hidden_layers": 1}, 4),
    # As in the example, ranks share the key-value heads and whole experts lie in attention's ranks;
    # 2 stages of 2 and 1 layers, 4 tensor ranks.
    "qwen3_235b_a22b": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "norm_topk_prob": True,
        },
        8,
    ),
}  # fmt: skip
SMALLER = {
    "qwen3_235b_a22b": (
        "parallel.tensor=4",
        "parallel.pipeline=2",
        "parallel.expert=4",
        "rollout.tensor=4",
    ),
}
# Short responses and few of them; whatever cuts the model stays as the example has it.
SHORT = (
    "rollout.prompts_per_step=4", "rollout.responses_per_prompt=4",
    "rollout.max_response_tokens=16",
    "rollout.kv_cache_mib=16", "rollout.max_num_seqs=16", "data.max_prompt_tokens=48",
    "trainer.steps=1", "trainer.epochs=1", "trainer.tokens_per_micro_batch=1024", "eval.sets={}",
    "logging.tensorboard=false", "rollout.engine={enable_prefix_caching: false}",
    # A random model earns no reward: entropy alone moves it.
    "objective.entropy_coefficient=1.0e-2", "optimizer.learning_rate=1e-2",
    "optimizer.warmup_steps=0",
)  # fmt: skip


@pytest.mark.slow  # more ranks of what `test_train_layouts` shows
@pytest.mark.parametrize("name", SHRUNKEN)
def test_shrunken_example_trains_for_one_step(tmp_path, name):
    architecture, sizes, ranks = SHRUNKEN[name]
    make_model(tmp_path / "model", architecture, **sizes)
    config, smaller = EXAMPLES / f"{name}.yaml", SMALLER.get(name, ())
    model_size = load_config(config, list(smaller)).parallel.model_size
    assert ranks % model_size == 0
    first, step = train(
        *SHORT, *smaller, f"parallel.data={ranks // model_size}", f"run.dir={tmp_path}",
        "run.name=run", config=config,
        places=(f"model.path={tmp_path}/model", f"data.train={TRAIN}", PLACES[-1]),
    )  # fmt: skip
    assert (first["step"], step["step"]) == (0, 1)
    assert step["ratio/first_minibatch_max_deviation"] == 0.0
    # Float32 in two implementations; the push has brought every weight to where it belongs.
    assert step["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert step["ratio/max_deviation"] > 1e-3  # the updates moved the policy
