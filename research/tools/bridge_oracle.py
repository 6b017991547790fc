"""Compare our tables of weights with Megatron-Bridge, which maps the same models independently.

    python research/tools/bridge_oracle.py

Every element of a tiny Hugging Face folder is its own number. Megatron-Bridge loads the folder into
Megatron's local layers, our loader fills parameters of the same names by the table, and both must
be equal on every rank, element by element. Prints a row per model and layout.

Megatron-Bridge is no dependency: its wheels, for Python 3.12, are unpacked without what they
require into .cache/releases, and two of its imports get stand-ins that nothing here calls.
"""

import argparse
import json
import os
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
from megatron_rl.models.architectures import ARCHITECTURES
from tests.functional.real_transformer_engine.install import ROOT, installed
from tests.ranks import run_ranks

BRIDGE, CORE = "0.6.2", "0.19.2"  # releases of the same weeks
RELEASES = (("megatron-bridge", BRIDGE), ("megatron-core", CORE))
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GROUPS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Names of Transformer Engine's parameters, for which a bridge may not list the local layers'.
LOCAL = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"),
    ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"),
    ("mlp.experts.linear_fc1.weight*", "mlp.experts.local_experts.*.linear_fc1.weight"),
    ("mlp.experts.linear_fc2.weight*", "mlp.experts.local_experts.*.linear_fc2.weight"),
)
MODELS = {
    "Qwen2": {"head_dim": None},
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen3": {},
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": []},
    "Glm4Moe": {
        **GROUPS, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "DeepseekV3": {
        **GROUPS, "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 16,
        "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    "Gemma3": {
        "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20,
        "sliding_window": 16,
    },
}  # fmt: skip
CLASSES = {"Gemma3": "Gemma3Text"}  # of their configs in transformers
# Parameters that have other places here.
RENAMED = (
    ("self_attention.linear_proj.post_layernorm.", "self_attention.post_layernorm."),
    ("mlp.linear_fc2.post_layernorm.", "mlp.post_layernorm."),
    ("core_attention.softmax_offset", "core_attention.sinks"),
)
# Buffers of Megatron's that no model folder has.
COMPUTED = ("local_tokens_per_expert", "cos_cached", "sin_cached")
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2-ep2": {"tensor": 2, "expert": 2, "expert_tensor": 1},
    "pp2": {"pipeline": 2, "expert_tensor": 1},
}
SIMPLE = {
    "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False,
    "persist_layer_norm": False, "moe_permute_fusion": False, "moe_grouped_gemm": False,
    "moe_router_fusion": False, "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False, "cross_entropy_fusion_impl": "native",
    "use_cpu_initialization": True, "perform_initialization": False, "sequence_parallel": False,
    "mtp_num_layers": None, "seq_length": 64, "transformer_impl": "local", "bf16": False,
    "fp16": False, "layernorm_zero_centered_gamma": False,
}  # fmt: skip


class _StandIn(ModuleType):
    """A module whose attributes are modules or classes without contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import torch

        is_class = name[0].isupper()
        made = (
            type(name, (torch.nn.Module,), {}) if is_class else _StandIn(f"{self.__name__}.{name}")
        )
        setattr(self, name, made)
        return made


def make_numbered(folder: Path, name: str) -> None:
    """Write a model folder in which every element of the weights is its own number from 1."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    sizes = {key: value for key, value in (SIZES | MODELS[name]).items() if value is not None}
    sizes |= {"sliding_window": None} if name == "Mistral" else {}
    config = getattr(transformers, f"{CLASSES.get(name, name)}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors, first = load_file(file), 1
    for key, value in tensors.items():
        numbers = torch.arange(first, first + value.numel(), dtype=torch.float32)
        tensors[key] = numbers.view(value.shape)
        first += value.numel()
    assert first < 2**24, "float32 has no such numbers"
    save_file(tensors, file, metadata={"format": "pt"})


def use_bridge() -> None:
    """Let this process import Megatron-Bridge and its Megatron-core; before either is imported."""
    import builtins

    import typing_extensions

    assert not any(name.startswith("megatron.") for name in sys.modules)
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(ROOT / f"{package}-{version}") for package, version in RELEASES]
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    for name in ("omegaconf", "hydra", "hydra.core", "hydra._internal"):
        sys.modules.setdefault(name, mock.MagicMock())
    engine, real = _StandIn("transformer_engine"), builtins.__import__

    def find(name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0):
        asks = (names or {}).get("__name__", "")
        if not (name.split(".")[0] == "transformer_engine" and asks.startswith("megatron.bridge")):
            return real(name, names, local, fromlist, level)
        found: Any = engine  # Megatron-core itself finds none
        for part in name.split(".")[1:] if fromlist else ():
            found = getattr(found, part)
        return found

    builtins.__import__ = find


def make_attention() -> type:
    """Return a core attention without arithmetic: Megatron's refuses values of their own size."""
    import torch
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.core.transformer.module import MegatronModule

    class NoAttention(MegatronModule):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config)
            if config.softmax_type == "learnable":
                heads = config.num_attention_heads // config.tensor_model_parallel_size
                self.softmax_offset = torch.nn.Parameter(torch.zeros(heads))

    AutoMapping.register_module_type("NoAttention", "column")
    return NoAttention


def make_normed_linear() -> type:
    """Return a local layer for the bridge's linear with a norm after it."""
    import torch
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.core.tensor_parallel import RowParallelLinear

    class NormedRowLinear(RowParallelLinear):
        def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, **kwargs)
            self.post_layernorm = torch.nn.RMSNorm(output_size)

    AutoMapping.register_module_type("NormedRowLinear", "row")
    return NormedRowLinear


def add_local_names(registry: Any) -> Any:
    """Return a bridge's mappings and copies of them for local layers."""
    import copy

    known, more = {each.megatron_param for each in registry.mappings}, []
    for mapping in registry.mappings:
        for fused, local in LOCAL:
            name = mapping.megatron_param.replace(fused, local)
            if name not in known:
                known.add(name)
                more.append(copy.copy(mapping))
                more[-1].megatron_param = name
                if hasattr(mapping, "_tp_mapping"):
                    more[-1]._tp_mapping = type(mapping._tp_mapping)(name, name)
    return type(registry)(*registry.mappings, *more)


def load_by_bridge(folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    """Return this rank's parameters and buffers, by name, as Megatron-Bridge loads them."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend

    bridge = AutoBridge.from_hf_pretrained(str(folder), dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    expert, tensor = layout.get("expert", 1), layout.get("tensor", 1)
    chosen = SIMPLE | {
        **dict.fromkeys(("params_dtype", "autocast_dtype", "pipeline_dtype"), torch.float32),
        "attention_backend": AttnBackend.auto,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": layout.get("pipeline", 1),
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": layout.get("expert_tensor", tensor),
    }
    for key, value in chosen.items():
        if hasattr(provider, key):
            setattr(provider, key, value)
    attention, normed = make_attention(), make_normed_linear()
    has_post_norms = type(provider).__name__.startswith("Gemma")

    def build_spec(config: Any, vp_stage: int | None = None) -> Any:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage,
            normalization=config.normalization,
        )  # fmt: skip
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
            if has_post_norms:
                layer.submodules.self_attention.submodules.linear_proj = normed
                layer.submodules.mlp.keywords["submodules"].linear_fc2 = normed
        return spec

    provider.transformer_layer_spec = build_spec
    bridge_class = type(bridge._model_bridge)
    list_mappings = bridge_class.mapping_registry
    bridge_class.mapping_registry = lambda self: add_local_names(list_mappings(self))
    provider.finalize()
    if hasattr(provider, "_pg_collection"):
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    bridge.load_hf_weights([model])
    bridge_class.mapping_registry = list_mappings
    loaded = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for theirs, here in RENAMED:
        loaded = {name.replace(theirs, here): value for name, value in loaded.items()}
    if provider.glu_linear_offset:  # gpt-oss: rows of gate and up are in turn here
        loaded |= {
            name: torch.stack(value.chunk(2), 1).flatten(0, 1)
            for name, value in loaded.items() if ".linear_fc1." in name
        }  # fmt: skip
    return loaded


def compare(rank: int, world_size: int, root: str, layouts: dict[str, dict[str, int]]) -> str:
    """Return, by model and layout, the elements compared on one rank and their differences."""
    use_bridge()
    import torch
    from megatron.core import parallel_state

    from megatron_rl.actor import groups
    from megatron_rl.actor.cpu_adaptation import megatron_runtime
    from megatron_rl.actor.weights import load_weights
    from megatron_rl.models.shape import read_model_shape
    from megatron_rl.resharding.layouts import layout_of
    from megatron_rl.resharding.pieces import parameter_shapes

    results: dict[str, Any] = {}
    for label, layout in layouts.items():
        topology = groups.initialise(**layout)
        for name in sorted(os.listdir(root)):
            folder = Path(root) / name
            shape = read_model_shape(folder)
            if layout.get("expert", 1) > 1 and shape.experts is None:
                continue
            if name == "GptOss" and "expert_tensor" not in layout:
                continue  # Megatron refuses biases of experts that are split
            with megatron_runtime():
                theirs = load_by_bridge(folder, layout)
            sizes = parameter_shapes(layout_of(topology).pieces(shape, rank=rank))
            ours = {
                key: torch.zeros(theirs[key].shape if key in theirs else size)
                for key, size in sizes.items()
            }
            load_weights(ours, shape=shape, topology=topology, folder=folder)
            common = ours.keys() & theirs.keys()
            results[f"{name} {label}"] = {
                "elements": sum(ours[key].numel() for key in common),
                "differ": sorted(key for key in common if not torch.equal(ours[key], theirs[key])),
                "only_here": sorted(ours.keys() - common),
                "only_there": sorted(
                    key for key, value in theirs.items()
                    if key not in common and value.numel() and not key.endswith(COMPUTED)
                ),
            }  # fmt: skip
        parallel_state.destroy_model_parallel()
    return json.dumps(results)


def run(root: Path) -> list[dict[str, Any]]:
    """Compare all models; return each rank's results by model and layout."""
    for name in MODELS:
        if f"{name}ForCausalLM" in ARCHITECTURES:
            make_numbered(root / name, name)
    answers = run_ranks(compare, 2, str(root), LAYOUTS, fresh=True)
    return [json.loads(answer) for answer in answers]


def main() -> None:
    """Install the releases if they are not there, compare, and print a table."""
    import tempfile

    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()  # type: ignore[union-attr]
    for package, version in RELEASES:
        installed(package, version)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(Path(folder))
    print("| model, layout | elements, by rank | differences | only here | only there |")
    print("|---|---|---|---|---|")
    for key in ranks[0]:
        cells = [
            " ".join(str(rank[key]["elements"]) for rank in ranks),
            *("; ".join(sorted({n for rank in ranks for n in rank[key][what]})) or "none"
              for what in ("differ", "only_here", "only_there")),
        ]  # fmt: skip
        print(f"| {key} | " + " | ".join(cells) + " |")
    if any(each["differ"] for rank in ranks for each in rank.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
