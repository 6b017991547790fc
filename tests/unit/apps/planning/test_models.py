"""Built-in models: their published sizes, their config.json, and their names."""

import math
import subprocess
import sys

import pytest

from megatron_rl.apps.planning.models import MODELS, find_shape, write_config_json
from megatron_rl.models.shape import read_model_shape, tensor_shapes


@pytest.mark.parametrize(
    "name,billions",
    [
        ("Qwen2.5-0.5B", 0.494),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1.777),
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-32B", 32.764),
        ("Qwen3-30B-A3B", 30.532),
        ("Qwen3-235B-A22B", 235.094),
        ("GLM-4.5-Air", 106.852),  # "106B", without the layer that predicts two tokens ahead
        ("GLM-4.5", 352.798),  # "355B", likewise
        ("Moonlight-16B-A3B-Instruct", 15.960),
        ("DeepSeek-V3", 671.026),
        ("Llama-3.1-70B", 70.554),
        ("Mistral-7B-Instruct-v0.3", 7.248),
        ("Mistral-Small-24B-Instruct-2501", 23.572),
        ("gpt-oss-20b-bf16", 20.91),  # table 1 of arXiv 2508.10925
        ("gpt-oss-120b-bf16", 116.83),
        # Embeddings and the rest, table 1 of arXiv 2503.19786.
        ("Gemma-3-1B-it", 0.302 + 0.698),
        ("Gemma-3-4B-it-text", 0.675 + 3.209),
        ("Gemma-3-12B-it-text", 1.012 + 10.759),
        ("Gemma-3-27B-it-text", 1.416 + 25.600),
    ],
)
def test_built_in_models_have_their_published_size(name, billions):
    # Totals on the Hugging Face hub, in 10^9.
    count = sum(math.prod(size) for size in tensor_shapes(MODELS[name]).values())
    assert count / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("name", MODELS)
def test_config_json_of_built_in_model_is_read_back(name, tmp_path):
    assert read_model_shape(write_config_json(MODELS[name], tmp_path)) == MODELS[name]


def test_find_shape_raises_for_unknown_model():
    with pytest.raises(ValueError, match=r"Qwen9-1B is neither a folder .* Qwen2\.5-0\.5B"):
        find_shape("Qwen/Qwen9-1B")
    assert find_shape("Qwen/Qwen2.5-7B") is MODELS["Qwen2.5-7B"]


def test_command_refuses_an_unknown_name_before_it_imports_what_takes_seconds():
    code = """
import sys
from megatron_rl.cli import main
try:
    main(["plan", "Qwen3.55", "--devices", "8"])
except SystemExit:
    print([one for one in ("torch", "transformers", "vllm", "megatron") if one in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and "Qwen3.55" in done.stderr
