"""Choice of Transformer Engine's layers, their sequence boundaries, and requirements of fp8."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core import utils
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version

from megatron_rl.actor import build, model
from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.settings import GEMM_TOKENS, ActorSettings
from megatron_rl.config import ParallelSection, parse_config
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.adapters import adapters_of_experts
from megatron_rl.models.shape import ExpertShape, ModelShape
from megatron_rl.preflight import layout
from megatron_rl.preflight import settings as preflight

LOW = torch.bfloat16
FUSED_PERMUTATION = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=2,
    hidden_size=96,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=80,
    vocab_size=64,
    max_position_embeddings=64,
    rotary_base=1e4,
    norm_epsilon=1e-6,
    tied_embeddings=False,
)


@pytest.mark.parametrize(
    ("installed", "device", "capability", "dtype", "setting", "used"),
    [
        (True, CUDA, (9, 0), LOW, None, True),
        (True, CUDA, (10, 3), LOW, None, True),
        (True, CUDA, (8, 9), LOW, None, False),  # no THD attention in linear memory
        (True, CUDA, (12, 0), LOW, None, False),  # THD gradients were wrong
        (True, CUDA, (8, 0), LOW, True, True),
        (True, CUDA, (9, 0), LOW, False, False),
        (True, CUDA, (9, 0), torch.float32, None, False),  # its fused attention knows no float32
        (True, CPU, None, LOW, None, False),
        (False, CUDA, (9, 0), LOW, None, False),
    ],
)
def test_transformer_engine_is_used_under_its_conditions(
    monkeypatch, installed, device, capability, dtype, setting, used
):
    monkeypatch.setattr(model.te, "HAVE_TE", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = ActorSettings(dtype=dtype, transformer_engine=setting)
    assert model.uses_transformer_engine(settings, device=device) is used


def test_adapters_are_on_its_layers_only_if_required(monkeypatch):
    monkeypatch.setattr(model.te, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    experts = replace(SHAPE, experts=ExpertShape(4, 2, 16, normalize_top_k=True))

    def is_used(required, targets, shape):
        lora = LoraSection(rank=8, alpha=16.0, targets=targets)
        settings = ActorSettings(dtype=LOW, transformer_engine=required, lora=lora)
        local_only = adapters_of_experts(shape, targets)
        return model.uses_transformer_engine(settings, device=CUDA, local_only=local_only)

    assert not is_used(None, ("qkv",), SHAPE)
    assert is_used(True, ("qkv", "fc1"), SHAPE) and is_used(True, ("qkv",), experts)
    with pytest.raises(ValueError, match=r"adapters of experts \(fc1 or fc2 in lora\.targets\)"):
        is_used(True, ("qkv", "fc1"), experts)
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    given = {"model": {"path": "p", "transformer_engine": True}, "data": {"train": "t"},
             "lora": {"rank": 8}, "optimizer": {"learning_rate": 1e-4}}  # fmt: skip
    (problem,) = preflight._transformer_engine_problems(parse_config(given), experts)
    assert "the model has adapters of experts" in problem
    assert not preflight._transformer_engine_problems(parse_config(given), SHAPE)


def test_devices_with_wrong_gradients_warn(monkeypatch):
    monkeypatch.setattr(model.te, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    settings = ActorSettings(dtype=LOW, transformer_engine=True)
    with pytest.warns(UserWarning, match=r"capability 12\.0: its attention has computed wrong"):
        assert model.uses_transformer_engine(settings, device=CUDA)


def test_sliding_window_under_context_parallelism_uses_local_layers(monkeypatch):
    config = build.build_transformer_config(
        replace(SHAPE, sliding_window=4096), ActorSettings(dtype=LOW), Topology()
    )
    assert config.window_size == (4095, 0)  # keys before a query
    monkeypatch.setattr(model.te, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def is_used(cp_size, **required):
        settings = ActorSettings(dtype=LOW, **required)
        return model.uses_transformer_engine(settings, device=CUDA, window=4096, cp_size=cp_size)

    assert is_used(1) and not is_used(2)
    for required in ({"transformer_engine": True}, {"fp8": "tensorwise"}):
        with pytest.raises(ValueError, match=r"4096 tokens and parallel\.context=2.*set parallel"):
            is_used(2, **required)
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    given = {"model": {"path": "p", "transformer_engine": True}, "data": {"train": "t"}}
    shape = replace(SHAPE, sliding_window=4096)
    assert not preflight._transformer_engine_problems(parse_config(given), shape)
    config = parse_config(given | {"parallel": {"context": 2}})
    (problem,) = preflight._transformer_engine_problems(config, shape)
    assert "window of 4096 tokens, and parallel.context is 2; set parallel.context to 1" in problem


@pytest.mark.parametrize("required", [{"transformer_engine": True}, {"fp8": "tensorwise"}])
def test_required_but_missing_transformer_engine_raises(monkeypatch, required):
    monkeypatch.setattr(model.te, "HAVE_TE", False)
    with pytest.raises(ValueError, match="finds no Transformer Engine: `megatron-rl doctor`"):
        model.uses_transformer_engine(ActorSettings(dtype=LOW, **required), device=CUDA)


def test_fp8_is_passed_to_megatron_only_when_set(monkeypatch):
    monkeypatch.setattr(model.te, "HAVE_TE", True)

    def config_of(**settings):
        settings = ActorSettings(dtype=LOW, **settings)
        return build.build_transformer_config(SHAPE, settings, Topology())

    config = config_of(fp8="tensorwise")
    assert (config.fp8, config.fp8_recipe) == ("hybrid", "tensorwise")
    assert config.transformer_impl == "transformer_engine"
    assert not config.fp8_param  # weights stay in bfloat16: they are exported and pushed
    assert (config_of().fp8, config_of().transformer_impl) == (None, "local")


@pytest.fixture
def released(monkeypatch):
    """A release of Transformer Engine, for Megatron's checks of experts."""
    monkeypatch.setattr(utils, "_te_version", Version("2.11.0"))


EXPERTS = replace(SHAPE, experts=ExpertShape(8, 2, 32, True))


def test_expert_tokens_are_padded_for_one_recipe_only(monkeypatch, released):
    """Megatron pads each expert's tokens to what tensorwise scaling needs, not blockwise."""
    assert get_fp8_align_size("tensorwise") % GEMM_TOKENS["tensorwise"] == 0
    assert get_fp8_align_size("blockwise") % GEMM_TOKENS["blockwise"] != 0
    monkeypatch.setattr(model.te, "HAVE_TE", True)
    build_config = partial(build.build_transformer_config, topology=Topology())
    config = build_config(EXPERTS, ActorSettings(dtype=LOW, fp8="tensorwise"))
    assert config.fp8_recipe == "tensorwise" and config.moe_grouped_gemm
    with pytest.raises(ValueError, match="pads the tokens of an expert to a multiple of 16; use"):
        build_config(EXPERTS, ActorSettings(dtype=LOW, fp8="blockwise"))
    assert build_config(SHAPE, ActorSettings(dtype=LOW, fp8="blockwise")).fp8_recipe == "blockwise"
    given = {"model": {"path": "p", "fp8": "blockwise"}, "data": {"train": "t"}}
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    problems = preflight._transformer_engine_problems(parse_config(given), EXPERTS)
    assert any("use model.fp8=tensorwise for a mixture of experts" in one for one in problems)


@pytest.mark.parametrize(
    ("device", "installed", "fused"), [(CUDA, True, True), (CUDA, False, False), (CPU, True, False)]
)
def test_tokens_are_sorted_by_kernels_where_they_exist(
    monkeypatch, released, device, installed, fused
):
    monkeypatch.setattr(model.te, "HAVE_TE", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in FUSED_PERMUTATION:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)
    settings = ActorSettings(dtype=LOW, transformer_engine=None if device is CUDA else True)
    config = build.build_transformer_config(EXPERTS, settings, Topology(device=device))
    assert config.moe_permute_fusion is fused
    assert config.moe_token_dispatcher_type == "alltoall"


def gradient_errors(micro_batches: int) -> tuple[float, float]:
    """Return the relative errors of summed weight gradients: rounded to bfloat16, and fused."""
    generator = torch.Generator().manual_seed(0)
    exact, rounded, fused = (torch.zeros(48, 64, dtype=kind) for kind in (torch.double, None, None))
    for _ in range(micro_batches):
        x, grad = (torch.randn(256, size, generator=generator).to(LOW) for size in (64, 48))
        exact += grad.double().t() @ x.double()
        rounded += grad.t() @ x  # bfloat16, as Megatron's hook adds it
        fused += grad.float().t() @ x.float()  # of bfloat16 values, every product is exact
    of_rounded, of_fused = (
        float((value - exact).norm() / exact.norm()) for value in (rounded, fused)
    )
    return of_rounded, of_fused


def test_products_into_float32_are_exact_to_float32():
    """Weight gradients added by the product itself, or rounded per micro-batch and added after."""
    rounded, fused = gradient_errors(8)
    assert fused < 1e-6 < 1e-3 < rounded < 3e-3


def test_contradictory_fp8_settings_raise():
    for wrong in (
        {"fp8": "tensorwise", "dtype": torch.float32},
        {"fp8": "tensorwise", "dtype": LOW, "transformer_engine": False},
    ):
        with pytest.raises(ValueError, match="fp8="):
            ActorSettings(**wrong)


def test_boundaries_cover_whole_pack():
    layout = SequenceLayout((8, 4), torch.ones(12), cp_rank=1, cp_size=2)
    messages = PackContext(layout=layout).boundaries
    assert messages.qkv_format == "thd"
    assert messages.cu_seqlens_q.tolist() == [0, 8, 12]
    assert messages.cu_seqlens_q.dtype == torch.int32
    # By name and by identity: releases check the one or the other.
    assert messages.pad_between_seqs is False
    assert messages.cu_seqlens_q is messages.cu_seqlens_kv
    assert messages.cu_seqlens_q is messages.cu_seqlens_q_padded
    assert messages.cu_seqlens_kv is messages.cu_seqlens_kv_padded
    assert (messages.max_seqlen_q, messages.max_seqlen_kv) == (8, 8)


@pytest.mark.parametrize(
    ("fp8", "sequence_parallel", "fits", "does_not"),
    [
        (None, True, 7, None),
        ("tensorwise", False, 48, 40),
        ("tensorwise", True, 64, 48),  # 24 on each of two ranks
        ("blockwise", False, 256, 64),
    ],
)
def test_unsupported_token_counts_raise_with_fp8(fp8, sequence_parallel, fits, does_not):
    config = SimpleNamespace(
        fp8="hybrid" if fp8 else None,
        fp8_recipe=fp8 or "delayed",
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2,
    )
    model = SimpleNamespace(config=config)
    PolicyModel._check_tokens(model, fits)
    if does_not:
        with pytest.raises(ValueError, match=f"has {does_not} tokens of a pack; with fp8={fp8}"):
            PolicyModel._check_tokens(model, does_not)


def test_unsupported_weight_sizes_raise_with_fp8(monkeypatch):
    # Over two ranks: queries 48, with keys and values (6 + 2 * 2) * 16 / 2 = 80, feed-forward 40.
    sizes = layout.product_sizes(ParallelSection(tensor=2), SHAPE)
    assert list(sizes.values()) == [96, 48, 80, 40]
    monkeypatch.setattr(preflight, "has_cuda", lambda: True)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    given = {"model": {"path": "p", "fp8": "tensorwise"}, "data": {"train": "t"}}
    (problem,) = preflight._transformer_engine_problems(
        parse_config(given | {"parallel": {"tensor": 2}}), SHAPE
    )
    assert "a rank's feed-forward size is 40; matrix products in fp8 need" in problem
    assert not preflight._transformer_engine_problems(parse_config(given), SHAPE)
