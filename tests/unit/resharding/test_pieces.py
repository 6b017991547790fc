"""Pieces against independent definitions of the layouts, for every architecture."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.models.architectures import ARCHITECTURES
from megatron_rl.models.weights import Factors
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import Matrix, chunk_layers, megatron_pieces, vllm_pieces
from tests.unit.resharding.shapes import numbered_tensors, small_shape


def _fill(pieces, tensors) -> dict[str, Tensor]:
    """Fill local parameters (as matrices) from `tensors`; no element may be written twice."""
    sizes: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        height, width = sizes.get(piece.parameter, (0, 0))
        bottom, right = piece.top + piece.shape[0], piece.left + piece.shape[1]
        sizes[piece.parameter] = (max(height, bottom), max(width, right))
    filled = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    for piece in pieces:
        place = piece.of_parameter(filled[piece.parameter])
        assert not place.any(), f"{piece} overlaps another piece"
        place.copy_(piece.of_tensor(tensors[piece.tensor]))
    return filled


def test_rectangles_of_views_are_those_of_slicing():
    """Parameters are views into Megatron's buffers, and may be vectors or transposed."""
    memory = torch.arange(1000)
    for parameter in (
        memory[7:].as_strided((5, 4, 6), (24, 6, 1), 31),  # experts, from an odd place on
        memory[100:172].view(8, 9)[:, 2:7],
        memory[3:75].view(8, 9).t(),
    ):
        matrix = parameter.reshape(-1, parameter.shape[-1])
        assert torch.equal(Matrix(parameter).rectangle(3, 2, 4, 1), matrix[4:7, 1:3])
    assert Matrix(memory[5:]).rectangle(3, 1, 2, 0).tolist() == [[7], [8], [9]]
    Matrix(memory).rectangle(2, 1, 4, 0).zero_()  # a view
    assert memory[3:7].tolist() == [3, 0, 0, 6]


def _megatron_qkv(tensors, layer: int, rank: int, size: int, shape, what: str) -> Tensor:
    """Build Megatron's linear_qkv like its checkpoint converters: reshape, concatenate, chunk."""
    groups = shape.num_query_groups
    parts = [
        tensors[f"model.layers.{layer}.self_attn.{name}_proj.{what}"].reshape(
            groups, -1, shape.hidden_size if what == "weight" else 1
        )
        for name in "qkv"
    ]
    return torch.cat(parts, dim=1).flatten(0, 1).chunk(size)[rank]


@pytest.mark.parametrize("tp_size", [2, 8])
def test_megatron_pieces_match_megatron_sharding(tp_size):
    shape = small_shape()  # 8 query heads, 4 key heads: with tp 8 a shard is half of a group
    tensors = numbered_tensors(shape)
    # 37 rows are padded to 64: shards of 64, 32, 16 or 8 rows, of which the last ones are padding.
    rows = [max(0, min(37 - start, 64 // tp_size)) for start in range(0, 64, 64 // tp_size)]
    for rank in range(tp_size):
        local = _fill(megatron_pieces(shape, tp_rank=rank, tp_size=tp_size), tensors)
        for layer in range(shape.num_layers):
            hf, own = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            for what in ("weight", "bias"):
                expected = _megatron_qkv(tensors, layer, rank, tp_size, shape, what)
                assert torch.equal(local[f"{own}self_attention.linear_qkv.{what}"], expected)
            gate, up = (
                tensors[f"{hf}mlp.{n}_proj.weight"].chunk(tp_size)[rank] for n in ("gate", "up")
            )
            assert torch.equal(local[own + "mlp.linear_fc1.weight"], torch.cat([gate, up]))
            for name, source in (
                ("self_attention.linear_proj", "self_attn.o_proj"),
                ("mlp.linear_fc2", "mlp.down_proj"),
            ):
                expected = tensors[f"{hf}{source}.weight"].chunk(tp_size, dim=1)[rank]
                assert torch.equal(local[f"{own}{name}.weight"], expected)
        start = sum(rows[:rank])
        for name, source in (
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("output_layer.weight", "lm_head.weight"),
        ):
            expected = tensors[source][start : start + rows[rank]]
            assert torch.equal(local.get(name, torch.zeros(0, 20, dtype=torch.int64)), expected)


@pytest.mark.parametrize("tp_size", [2, 8])
def test_vllm_pieces_match_vllm_sharding(tp_size):
    shape = small_shape()  # 8 query heads, 4 key heads: with tp 8 two ranks share a key head
    tensors = numbered_tensors(shape)
    for rank in range(tp_size):
        local = _fill(vllm_pieces(shape, tp_rank=rank, tp_size=tp_size), tensors)
        q, k, v = (tensors[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkv")
        key_rank, key_size = (rank, tp_size) if tp_size <= 4 else (rank // 2, 4)
        expected = [
            q.chunk(tp_size)[rank],
            k.chunk(key_size)[key_rank],
            v.chunk(key_size)[key_rank],
        ]
        assert torch.equal(local["model.layers.2.self_attn.qkv_proj.weight"], torch.cat(expected))
        gate, up = (
            tensors[f"model.layers.2.mlp.{n}_proj.weight"].chunk(tp_size)[rank]
            for n in ("gate", "up")
        )
        assert torch.equal(local["model.layers.2.mlp.gate_up_proj.weight"], torch.cat([gate, up]))


def _by_key_head(*parts, key_heads=8):
    """Put the rows of each key head together: part by part, as in Megatron's parameter."""
    return torch.cat([part.unflatten(0, (key_heads, -1)) for part in parts], dim=1).flatten(0, 1)


@pytest.mark.parametrize("tp_size", [2, 8])
def test_megatron_has_the_rows_of_a_head_together(tp_size):
    # 8 key heads of 3, 16 value heads of 5; attention: 8 heads of 4 in 4 groups.
    shape = small_shape("Qwen3_5ForCausalLM")
    tensors = numbered_tensors(shape)
    net, attention = "model.layers.2.linear_attn.", "model.layers.1.self_attn."
    qkv, z, b, a, conv = (
        tensors[f"{net}{name}.weight"]
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d")
    )
    q, gate = tensors[f"{attention}q_proj.weight"].unflatten(0, (8, 2, 4)).unbind(1)
    k, v = (tensors[f"{attention}{name}_proj.weight"] for name in "kv")
    heads = (q.flatten(0, 1), gate.flatten(0, 1), k, v)
    expected = {
        "2.self_attention.linear_qkvz.weight": _by_key_head(*qkv.split([24, 24, 80]), z),
        "2.self_attention.linear_ba.weight": _by_key_head(b, a),
        "2.self_attention.conv1d.weight": _by_key_head(*conv.squeeze(1).split([24, 24, 80])),
        "2.self_attention.A_log": tensors[f"{net}A_log"][:, None],
        "1.self_attention.linear_qkv.weight": _by_key_head(*heads, key_heads=4),
    }
    for rank in range(tp_size):
        local = _fill(megatron_pieces(shape, tp_rank=rank, tp_size=tp_size), tensors)
        for name, whole in expected.items():
            assert torch.equal(local[f"decoder.layers.{name}"], whole.chunk(tp_size)[rank]), name


@pytest.mark.parametrize("tp_size", [2, 8])
def test_vllm_has_shards_of_the_parts_of_a_net(tp_size):
    shape = small_shape("Qwen3_5ForCausalLM")
    tensors = numbered_tensors(shape)
    net, attention = "model.layers.2.linear_attn.", "model.layers.1.self_attn."
    q, k, v = tensors[f"{net}in_proj_qkv.weight"].split([24, 24, 80])
    z, b, a = (tensors[f"{net}in_proj_{name}.weight"] for name in "zba")
    conv = tensors[f"{net}conv1d.weight"].squeeze(1).split([24, 24, 80])
    for rank in range(tp_size):
        local = _fill(vllm_pieces(shape, tp_rank=rank, tp_size=tp_size), tensors)

        def own(*parts, rank=rank):
            return torch.cat([part.chunk(tp_size)[rank] for part in parts])

        assert torch.equal(local[f"{net}in_proj_qkvz.weight"], own(q, k, v, z))
        assert torch.equal(local[f"{net}in_proj_ba.weight"], own(b, a))
        assert torch.equal(local[f"{net}conv1d.weight"], own(*conv))
        # A head's query and gate stay together; with 8 ranks two of them share a key head.
        shared = {"rank": rank // 2} if tp_size == 8 else {}
        keys = [tensors[f"{attention}{name}_proj.weight"] for name in "kv"]
        keys = [key.chunk(min(tp_size, 4))[shared.get("rank", rank)] for key in keys]
        expected = torch.cat([own(tensors[f"{attention}q_proj.weight"]), *keys])
        assert torch.equal(local[f"{attention}qkv_proj.weight"], expected)


# In the names of tensors that every tensor-parallel rank has whole.
WHOLE = ("norm", ".gate.", "expert_gate.", "_a_proj", "o_proj.bias", "router.")


@settings(deadline=None, max_examples=20)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    tied=st.booleans(),
    sizes=st.tuples(*[st.sampled_from([1, 2])] * 4, *[st.sampled_from([1, 2, 4])] * 2),
    groups=st.sampled_from([1, 2, 4]),
    whole_experts=st.booleans(),
    stage_layers=st.permutations([1, 1, 3, 2]),
    fused=st.booleans(),
)
def test_megatron_pieces_cover_every_element_once_per_replica(
    architecture, tied, sizes, groups, whole_experts, stage_layers, fused
):
    context, pipeline, virtual, data, tensor, expert = sizes
    shape = small_shape(architecture, tied_embeddings=tied, num_layers=7, num_query_groups=groups)
    expert_tensor = 1 if whole_experts or shape.traits.biases else tensor
    if shape.experts is None or (tensor * context * data) % (expert_tensor * expert):
        expert, expert_tensor = 1, 1 if shape.traits.biases else tensor
    chosen = tuple(stage_layers) if pipeline * virtual == 4 else None
    layout = ActorLayout(
        tensor, pipeline, context, data, virtual, expert, expert_tensor, stage_layers=chosen
    )
    tensors = numbered_tensors(shape)
    holders = {name: torch.zeros_like(value) for name, value in tensors.items()}
    for rank in range(layout.world_size):
        pieces = layout.pieces(shape, rank=rank, fused=fused)
        _fill(pieces, tensors)  # no local element twice
        for piece in pieces:
            piece.of_tensor(holders[piece.tensor]).add_(1)
    copies = layout.context * layout.data
    for name, held in holders.items():
        expected = copies
        if ".experts." in name:
            expected = tensor * copies // (expert * expert_tensor)
        elif any(kind in name for kind in WHOLE):
            expected = copies * tensor
        elif name == "model.embed_tokens.weight" and tied and (pipeline, virtual) != (1, 1):
            expected = 2 * copies  # the last stage's output layer
        assert (held == expected).all(), (name, held.unique(), expected)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_vllm_pieces_cover_whole_model_per_engine(architecture):
    shape = small_shape(architecture)
    tensors = numbered_tensors(shape)
    for tp_size in (1, 4):
        layout = EngineLayout(tensor=tp_size, world_size=4)
        held = {name: torch.zeros_like(value) for name, value in tensors.items()}
        for rank in range(tp_size):
            pieces = layout.pieces(shape, rank=rank)
            _fill(pieces, tensors)
            for piece in pieces:
                piece.of_tensor(held[piece.tensor]).add_(1)
        for name, count in held.items():
            shared = any(kind in name for kind in (*WHOLE, "w2_bias"))
            assert (count == (tp_size if shared else 1)).all(), name


def test_pieces_reject_impossible_layouts():
    shape = small_shape()
    for tp_size, what in itertools.product((3, 16), ("heads",)):
        with pytest.raises(ValueError, match=what):
            megatron_pieces(shape, tp_size=tp_size)
    with pytest.raises(ValueError, match="4 layers cannot be divided among 5"):
        ActorLayout(pipeline=5).pieces(shape, rank=0)
    with pytest.raises(ValueError, match=r"stage_layers=\[3, 2\] must .* 2 .* sum of 4"):
        ActorLayout(pipeline=2, stage_layers=(3, 2)).pieces(shape, rank=0)
    with pytest.raises(ValueError, match="4 key-value heads neither"):
        megatron_pieces(small_shape(num_attention_heads=12), tp_size=6)
    with pytest.raises(ValueError, match="does not divide 4 ranks"):
        EngineLayout(tensor=3, world_size=4).pieces(shape, rank=0)


@settings(deadline=None, max_examples=60)
@given(chunks=st.integers(1, 24), num_layers=st.integers(1, 100))
def test_automatic_chunks_are_even_or_smaller_at_both_ends(chunks, num_layers):
    if num_layers < chunks:
        return
    layers = chunk_layers(num_layers, chunks=chunks)
    assert [i for each in layers for i in each] == list(range(num_layers))
    sizes = [len(each) for each in layers]
    small = [size == min(sizes) for size in sizes]
    assert max(sizes) - min(sizes) == (num_layers % chunks > 0)
    if not all(small):  # the small ones are a prefix and a suffix, the suffix longer by 0 or 1
        prefix, suffix = small.index(False), small[::-1].index(False)
        assert sum(small) == prefix + suffix and suffix - prefix in (0, 1)


def test_chunks_of_model_of_94_layers():
    # Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split
    # give the same: (94 + 2) / 4 = 24 less one at both ends.
    assert [len(each) for each in chunk_layers(94, chunks=4)] == [23, 24, 24, 23]
    assert [len(each) for each in chunk_layers(94, chunks=8)] == [11, *[12] * 6, 11]


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("Qwen2ForCausalLM", ("qkv", "proj", "fc1", "fc2")),
        ("Glm4MoeForCausalLM", ("qkv", "fc1", "fc2")),
        ("DeepseekV3ForCausalLM", ("proj", "fc2")),
    ],
)
def test_product_of_local_factors_is_the_local_part_of_their_product(architecture, targets):
    """W = B A of whole factors, cut like any weight, on ranks of Megatron and of vLLM."""
    shape = small_shape(architecture)
    alone = replace(shape, factors=Factors(3, targets))
    factors = numbered_tensors(alone)
    weights = {name: torch.zeros_like(value) for name, value in numbered_tensors(shape).items()}
    for name in weights.keys() & {n.replace(".lora_B", "") for n in factors}:
        module = name.removesuffix(".weight")
        shared = re.sub("[kv]_proj$", "q_proj", module).replace("up_proj", "gate_proj")
        weights[name] = factors[f"{module}.lora_B.weight"] @ factors[f"{shared}.lora_A.weight"]
    compared = set()
    for layout in (ActorLayout(2, 2), ActorLayout(4, data=2, expert=2), EngineLayout(2, 2)):
        for rank in range(layout.world_size):
            local = _fill(layout.pieces(shape, rank=rank), weights)
            own = _fill(layout.pieces(alone, rank=rank), factors)
            for name in [name for name in own if name.endswith(".lora_a")]:
                stem = name.removesuffix(".lora_a")
                if "routed_experts" in stem:
                    continue  # vLLM has all experts in one parameter, and gets no adapters of them
                product = own[f"{stem}.lora_b"] @ own[name]
                assert torch.equal(product, local[f"{stem}.weight"]), (layout, rank, stem)
                compared.add(stem.rpartition(".")[2])
    assert len(compared) >= 2 * len(targets)
