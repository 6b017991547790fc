"""Parameters per rank by formula, against the pieces that resharding divides a model into."""

from dataclasses import replace

import pytest
from megatron_rl.apps.planning.built_in import MODELS, find_shape, write_config_json
from megatron_rl.apps.planning.parts import (
    Parts,
    count_parameters,
    engine_parameters,
    model_parameters,
)

from megatron_rl.models.shape import read_model_shape
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import parameter_shapes, vllm_parameter_shapes

DENSE = replace(MODELS["Qwen2.5-0.5B"], num_layers=4)  # tied
UNTIED = replace(MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], num_layers=4)
EXPERTS = MODELS["Qwen3-30B-A3B"]
EXPERTS = replace(EXPERTS, num_layers=4, experts=replace(EXPERTS.experts, num_experts=8))
DENSE_FIRST = MODELS["GLM-4.5"]
DENSE_FIRST = replace(
    DENSE_FIRST, num_layers=4, experts=replace(DENSE_FIRST.experts, num_experts=8)
)
LATENT = MODELS["DeepSeek-V3"]
LATENT = replace(LATENT, num_layers=4, experts=replace(LATENT.experts, num_experts=8))

SHAPES = [DENSE, UNTIED, EXPERTS, DENSE_FIRST, LATENT]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=["tied", "untied", "experts", "dense first", "latent"]
)
@pytest.mark.parametrize("tensor,pipeline,expert", [(1, 1, 1), (2, 1, 1), (2, 2, 4), (1, 4, 2)])
def test_parameters_per_rank_match_resharding_pieces(shape, tensor, pipeline, expert):
    expert = expert if shape.experts else 1
    parts = Parts(tensor=tensor, pipeline=pipeline, expert=expert, data=4)
    layout = ActorLayout(tensor=tensor, pipeline=pipeline, expert=expert, data=4)
    for stage in range(pipeline):
        pieces = {
            name: rows * columns
            for name, (rows, columns) in parameter_shapes(
                layout.pieces(shape, rank=stage * layout.world_size // pipeline)
            ).items()
        }
        counted = count_parameters(shape, parts, stage=stage)
        # The vocabularies are multiples of 64 and of 2, so there is no padding.
        assert counted.total == sum(pieces.values())
        of_experts = sum(size for name, size in pieces.items() if ".experts." in name)
        assert counted.expert == of_experts


@pytest.mark.parametrize(
    "shape", SHAPES, ids=["tied", "untied", "experts", "dense first", "latent"]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_engine_parameters_match_weights_that_vllm_loads(shape, tensor):
    sizes = vllm_parameter_shapes(shape, tp_size=tensor)
    if shape.tied_embeddings:
        sizes.pop("lm_head.weight")
    loaded = 0
    for size in sizes.values():
        elements = 1
        for side in size:
            elements *= side
        loaded += elements
    assert engine_parameters(shape, tensor) == loaded


def test_key_value_heads_are_replicated_in_engine_with_more_ranks():
    # 4 key-value heads over 8 ranks: each rank stores a whole head instead of half of one.
    shape = replace(MODELS["Qwen3-235B-A22B"], num_layers=1)
    sizes = vllm_parameter_shapes(shape, tp_size=8)
    qkv = sizes["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv == (64 // 8 * 128 + 2 * 128, 4096)
    actor = count_parameters(shape, Parts(tensor=8), stage=0).total
    assert engine_parameters(shape, 8) - actor == 128 * 4096  # half a head of keys, half of values


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
    assert model_parameters(MODELS[name]) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("name", MODELS)
def test_config_json_of_built_in_model_is_read_back(name, tmp_path):
    assert read_model_shape(write_config_json(MODELS[name], tmp_path)) == MODELS[name]


def test_find_shape_raises_for_unknown_model():
    with pytest.raises(ValueError, match=r"Qwen9-1B is neither a folder .* Qwen2\.5-0\.5B"):
        find_shape("Qwen/Qwen9-1B")
    assert find_shape("Qwen/Qwen2.5-7B") is MODELS["Qwen2.5-7B"]
