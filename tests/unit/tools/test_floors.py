"""Floors of a run's phases: the tokens that are counted, and work that grows with them."""

import json
import math

import pyarrow
import pyarrow.parquet
import torch

from megatron_rl.config import load_config
from tools.benchmarks import against_trl, floors


def test_work_of_a_step_is_counted_from_its_rollouts(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [
        {"prompt_index": 3, "prompt_token_ids": [1] * 5, "token_ids": [2] * 4, "advantage": 0.0},
        {"prompt_index": 3, "prompt_token_ids": [1] * 5, "token_ids": [2] * 2, "advantage": 0.0},
        {"prompt_index": 7, "prompt_token_ids": [1] * 6, "token_ids": [2] * 9, "advantage": 0.0},
        {"prompt_index": 7, "prompt_token_ids": [1] * 6, "token_ids": [2] * 1, "advantage": -0.5},
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rollouts" / "step_000002.parquet")
    work = floors.read_work(tmp_path, 2, epochs=4)
    assert (work.prompts, work.responses) == (5 + 6, 16)  # a prompt counts once
    # One response alone has an advantage.
    assert (work.trained, work.trained_responses) == (4 * (6 + 1), 4 * 1)
    assert (work.longest, work.rows) == (9, 4)


def test_floors_follow_from_products_and_bytes(tmp_path, monkeypatch):
    """With a product of one second per 10**6 weights and rows, and a byte per second copied."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50,
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "hidden_act": "silu",
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = 2 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 16 * 8)  # query and output, key and value, MLP
    head = 50 * 8
    monkeypatch.setattr(floors, "best_seconds", lambda act, **_: float(1 << 26))
    monkeypatch.setattr(
        floors, "product_seconds", lambda some, rows, _: sum(map(math.prod, some)) * rows / 1e6
    )
    work = floors.Work(prompts=30, responses=200, trained=700, trained_responses=300, longest=2,
                       rows=8)  # fmt: skip
    found = floors.floors(work, tmp_path, processes=2, dtype=torch.float32)
    bytes_of_weights = 4 * (layers + head)
    assert math.isclose(found["behavior"], (230 * layers + 200 * head) / 2e6)
    assert math.isclose(found["train"], 3 * (700 * layers + 300 * head) / 2e6)
    assert found["sync"] == bytes_of_weights and found["rollout"] == 2 * bytes_of_weights


def test_pretrained_size_gives_both_systems_the_same_work():
    for name in ("135m", "135m, every group"):
        size = against_trl.SIZES[name]
        for layout in against_trl.LAYOUTS.values():
            config = load_config(size.config, [*size.settings, *layout, "data.columns={}"])
            assert config.objective.name == "grpo" and config.optimizer.learning_rate == size.rate
            low = any("bfloat16" in one for one in layout)
            assert config.trainer.dtype == ("bfloat16" if low else "float32")
    assert not against_trl.is_artificial(against_trl.SIZES["135m"])
    assert against_trl.is_artificial(against_trl.SIZES["135m, every group"])
