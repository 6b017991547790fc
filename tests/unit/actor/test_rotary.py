"""Rotary positions against their definition as a rotation of complex numbers."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from megatron_rl.actor.rotary import PackRotation, RotationByHalves, build_rotation
from megatron_rl.models.shape import read_model_shape
from tests.unit.resharding.shapes import small_shape


def test_pair_is_rotated_by_position_times_frequency():
    shape = small_shape(head_dim=4, rotary_base=100.0)  # frequencies 1 and 1 / 10
    positions = torch.tensor([0, 3, 1])  # any order: packs and zigzag shards
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = build_rotation(positions, shape, dtype=torch.float32).apply(x)
    # Element i is the real and element i + 2 the imaginary part.
    before = torch.complex(x[..., :2], x[..., 2:])
    turn = torch.polar(torch.ones(3, 1, 2), positions[:, None, None] * torch.tensor([1.0, 0.1]))
    after = before * turn
    want = torch.cat((after.real, after.imag), dim=-1)
    torch.testing.assert_close(out, want)
    grad = torch.randn(3, 2, 4)
    (mine,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (theirs,) = torch.autograd.grad(want, x, grad)
    torch.testing.assert_close(mine, theirs)


def test_both_rotations_are_bit_identical():
    """Compare CUDA's rotation by halves with the CPU's rotation by heads."""
    shape = small_shape(head_dim=16, rotary_base=100.0)
    by_head = build_rotation(torch.arange(9), shape, dtype=torch.float32)
    halves = (table[:, None, 8:] for table in (by_head.cosine, by_head.sine))
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(9, 3, 16, generator=generator) for _ in range(2))
    found = []
    for rotation in (by_head, RotationByHalves(*halves)):
        leaf = x.clone().requires_grad_()
        out = rotation.apply(leaf)
        out.backward(grad)
        found.append((out, leaf.grad))
    assert by_head.apply(x).transpose(0, 1).is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("dtype", "halves"), [(torch.float32, False), (torch.bfloat16, True)])
def test_rows_of_tables_are_bit_identical_to_tables_of_positions(dtype, halves):
    shape = small_shape(head_dim=16, rotary_base=1e6)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 4096, (203,), generator=generator)
    x, grad = (torch.randn(203, 3, 16, generator=generator).to(dtype) for _ in range(2))
    tables = build_rotation(torch.arange(4096), shape, dtype=dtype)
    direct = build_rotation(positions, shape, dtype=dtype)
    if halves:  # as on CUDA
        tables, direct = (
            RotationByHalves(one.cosine[:, None, 8:], one.sine[:, None, 8:])
            for one in (tables, direct)
        )
    pack = PackRotation(tables, positions.int())
    found = []
    for rotation in (direct, pack, pack):  # the second time as in a layer that is recomputed
        leaf = x.clone().requires_grad_()
        with contextlib.ExitStack() as stack:
            if rotation is pack and len(found) == 1:
                stack.enter_context(pack.selected())
            out = rotation.apply(leaf)
        out.backward(grad)
        found.append((out, leaf.grad))
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_forward_pass_selects_rows_once():
    tables = build_rotation(torch.arange(8), small_shape(head_dim=16), dtype=torch.float32)
    pack = PackRotation(tables, torch.tensor([3, 1], dtype=torch.int32))
    with pack.selected():
        rows = pack._rows
        assert len(rows.cosine) == 2
        pack.apply(torch.ones(2, 1, 16))
        assert pack._rows is rows
    assert pack._rows is None  # nothing but the positions is kept


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 500.0}},
    "yarn, old names": {"rope_scaling": YARN, "rope_theta": 500.0, "rope_parameters": None},
    "yarn, own attention factor": {"rope_scaling": {**YARN, "attention_factor": 0.8}},
    "yarn, no original maximum": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 2, "truncate": False}},
    "yarn, original maximum outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "original_max_position_embeddings": 48,
    },
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_scaled_positions_are_those_of_transformers(name, tmp_path):
    """Cosines and sines of a config.json, up to positions ten times the original maximum."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | CONFIGS[name]))
    theirs = Qwen2RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    positions = torch.tensor([0, 1, 15, 16, 33, 127, 128, 320])
    cosine, sine = theirs(torch.zeros(1), positions[None])  # [1, t, d], both halves alike
    shape = read_model_shape(tmp_path)
    mine = build_rotation(positions, shape, dtype=torch.float32)
    torch.testing.assert_close(mine.cosine, cosine[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.sine[:, 16:], sine[0, :, :16], rtol=0, atol=1e-6)
    plain = build_rotation(positions, replace(shape, rotary_scaling=None), dtype=torch.float32)
    assert torch.equal(mine.cosine, plain.cosine) == (name == "default")
