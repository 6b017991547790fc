"""The gated delta net as a layer, against those of transformers and of Megatron-core.

Four ranks, tensor 2 with sequence parallelism x context 2, in float64; packs of odd lengths.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.actor import dry_run_kernels, gated_delta_net
from megatron_rl.distributed.gated_delta import gated_delta
from megatron_rl.distributed.sequence_layout import SequenceLayout
from tests.ranks import run_ranks
from tests.unit.distributed.test_gated_delta import LENGTHS, inputs

SIZES = {
    "hidden_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 4,
    "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "Qwen3_5GatedDeltaNet"),
}


def in_float64(function, module, **calls):
    """Return a library's function without its casts to float32; calls: other functions in it."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :].replace("torch.float32", "torch.float64")
    namespace = {**vars(module), **calls}
    exec(source.replace(".float()", ".double()"), namespace)
    return namespace[function.__name__]


def chunk_rule(module):
    return in_float64(module.torch_chunk_gated_delta_rule, module)


def by_sequence(rule):
    """Return flash-linear-attention's call by a rule of one sequence."""

    def call(*, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        assert scale == q.shape[-1] ** -0.5
        repeats = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        outs, finals = [], []
        ends = cu_seqlens.tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(ends)):
            part = [x[:, start:stop] for x in (q, k, v)]
            first = None if initial_state is None else initial_state[number : number + 1]
            out, final = rule(
                *part, g=g[:, start:stop], beta=beta[:, start:stop], initial_state=first,
                output_final_state=output_final_state,
            )  # fmt: skip
            outs.append(out)
            finals.append(final)
        return torch.cat(outs, dim=1), torch.cat(finals) if output_final_state else None

    return call


def transformers_layer(name):
    import importlib

    import transformers

    config_name, _, layer_name = FAMILIES[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    layer = getattr(module, layer_name)(getattr(transformers, config_name)(**SIZES), 0).double()
    calls = {"torch_chunk_gated_delta_rule": chunk_rule(module)}
    for part in (layer, layer.norm):
        part.forward = functools.partial(in_float64(type(part).forward, module, **calls), part)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise - 3 if key == "A_log" else 0.4 * noise + (key == "norm.weight"))
    return layer


def hidden_and_cotangent():
    generator = torch.Generator().manual_seed(5)
    size = (sum(LENGTHS), SIZES["hidden_size"])
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


@functools.cache
def expected(name):
    layer = transformers_layer(name)
    hidden, cotangent = hidden_and_cotangent()
    hidden.requires_grad_()
    out = torch.cat([layer(part[None])[0] for part in hidden.split(LENGTHS)])
    (out * cotangent).sum().backward()
    grads = {key: parameter.grad for key, parameter in layer.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, **grads}


def build_layer(name, topology):
    from dataclasses import replace

    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_rl.actor.build import build_transformer_config
    from megatron_rl.actor.gated_delta_net import GatedDeltaNet
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.models.delta_net import DeltaShape
    from tests.unit.resharding.shapes import small_shape

    delta = DeltaShape(2, 4, 8, 12, 4, layers=(0, 1, 2))
    shape = small_shape(FAMILIES[name][1], delta=delta, hidden_size=24)
    config = build_transformer_config(shape, ActorSettings(), topology)
    config = replace(config, params_dtype=torch.float64, layernorm_epsilon=1e-3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GatedDeltaNet(config, shape=shape, pg_collection=groups), shape


def on_rank(rank, world_size):
    from megatron_rl.actor.cpu_adaptation import megatron_runtime

    with megatron_runtime():
        return compute(rank)


def compute(rank):
    from megatron_rl.actor import groups
    from megatron_rl.actor.layers import PackContext
    from megatron_rl.resharding.layouts import layout_of

    topology = groups.initialise(tensor=2, context=2)
    padded = [-(-length // 8) * 8 for length in LENGTHS]
    starts = np.cumsum([0, *padded[:-1]])
    rows = torch.cat([torch.arange(n) + at for n, at in zip(LENGTHS, starts, strict=True)])
    mask = torch.zeros(sum(padded), dtype=torch.bool)
    mask[rows] = True
    layout = SequenceLayout(padded, mask, cp_rank=topology.cp_rank, cp_size=2,
                            cp_group=topology.cp_group)  # fmt: skip

    def shard(x):  # over context, then over tensor
        full = torch.randn(sum(padded), *x.shape[1:], dtype=x.dtype) * (x is hidden)
        full[rows] = x
        return layout.shard(full).chunk(2)[topology.tp_rank][:, None]

    def whole(x):
        parts = [torch.empty_like(x) for _ in range(2)]
        torch.distributed.all_gather(parts, x.contiguous(), group=topology.tp_group)
        return layout.gather(torch.cat(parts)[:, 0])[rows]

    hidden, cotangent = hidden_and_cotangent()
    report = {}
    for name in FAMILIES:
        layer, shape = build_layer(name, topology)
        source = dict(transformers_layer(name).named_parameters())
        own = dict(layer.named_parameters())
        prefix, of_layer = "decoder.layers.0.self_attention.", "model.layers.0.linear_attn."
        pieces = [
            piece for piece in layout_of(topology).pieces(shape, rank=rank)
            if piece.tensor.startswith(of_layer)
        ]  # fmt: skip
        with torch.no_grad():
            for piece in pieces:
                values = piece.of_tensor(source[piece.tensor.removeprefix(of_layer)])
                piece.of_parameter(own[piece.parameter.removeprefix(prefix)]).copy_(values)
        for rule in ("torch", "kernel"):
            if rule == "kernel":  # the call of flash-linear-attention
                from transformers.models.qwen3_next import modeling_qwen3_next

                kernel = by_sequence(chunk_rule(modeling_qwen3_next))
                layer.rule = gated_delta_net.kernel_rule(kernel)
            layer.zero_grad()
            local = shard(hidden).requires_grad_()
            out, bias = layer(local, packed_seq_params=PackContext(layout=layout, host=layout))
            assert bias is None
            (out * shard(cotangent)).sum().backward()
            grads = {key: torch.zeros_like(value) for key, value in source.items()}
            for piece in pieces:
                grad = own[piece.parameter.removeprefix(prefix)].grad
                target = piece.of_tensor(grads[piece.tensor.removeprefix(of_layer)])
                target.copy_(piece.of_parameter(grad))
            for key, grad in grads.items():  # the norm's is already summed over tensor ranks
                group = topology.cp_group if key == "norm.weight" else None
                torch.distributed.all_reduce(grad, group=group)
            found = {"out": whole(out.detach()), "hidden": whole(local.grad), **grads}
            report[name, rule] = {key: value.numpy() for key, value in found.items()}
    return report


@functools.cache
def results():
    return run_ranks(on_rank, 4)[0]


@pytest.mark.parametrize("rule", ["torch", "kernel"])
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_and_gradients_are_those_of_transformers_in_float64(name, rule):
    found = results()[name, rule]
    for key, want in expected(name).items():
        assert abs(found[key] - want.numpy()).max() <= 1e-12 * max(1, want.abs().max()), key


def test_missing_kernel_is_warned_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.warns(UserWarning, match="several times slower: .*`pip install flash-linear-att"):
        assert gated_delta_net.choose_rule(on_cuda=True) is gated_delta_net.torch_rule


@pytest.mark.parametrize(
    ("capability", "triton", "refused"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((10, 0), "3.6.0", False)],
)
def test_kernel_that_refuses_gradients_is_not_used(monkeypatch, capability, triton, refused):
    module = SimpleNamespace(chunk_gated_delta_rule=chunk_rule)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(ops=None))
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton)
    if refused:
        with pytest.raises(ImportError, match=r"Hopper with Triton 3.6.0: `pip install tilelang`"):
            gated_delta_net.find_kernel()
    else:
        assert gated_delta_net.find_kernel() is chunk_rule


def test_kernel_of_the_dry_run_has_the_shapes_of_the_rule():
    counted = []
    kernel = dry_run_kernels.gated_delta(counted.append)
    q, k, v, g, beta, *_ = inputs(torch.float32)
    layout = SequenceLayout(LENGTHS, torch.ones(sum(LENGTHS)).bool())
    v.requires_grad_()
    out = gated_delta(q, k, v, g, beta, layout, rule=gated_delta_net.kernel_rule(kernel))
    assert out.shape == v.shape
    out.sum().backward()
    # 246 tokens, 3 heads of keys of 8 and values of 12, blocks of 64.
    forward = 2 * 246 * 3 * (64 * (3 * 8 + 2 * 12) + 3 * 8 * 12)
    assert counted == [forward, 3 * forward]
