"""Low-rank adapters (LoRA): sizes on a model's linears, and folders of the `peft` library.

A folder has rank and scale in adapter_config.json, and two factors of each Hugging Face linear in
adapter_model.safetensors; it is checked without torch. Here q, k and v share one A, and so do gate
and up. Factors that share none in the folder are stacked: with A = [A_q; A_k; A_v], and B of q with
zeros in the columns of k and v, the product is the same, and the rank three times as large. A
folder may have some of q, k and v, or one of gate and up: B of the others is 0.
"""

import json
from collections.abc import Collection, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import (
    FLOATS,
    format_problems,
    model_fingerprint,
    read_header,
)
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import Weight, is_adapted

# vLLM's MaxLoRARanks, without 1: ranks of the slots in which its kernels read adapters.
SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def adapted_linears(
    shape: ModelShape, targets: Collection[str]
) -> Iterator[tuple[Weight, int, int]]:
    """Yield each kind of weight with an adapter, and its sizes: of the side that is cut, and whole.

    targets: endings of Megatron's names, such as `qkv` of `linear_qkv`. A factor of rank r has r
    elements per unit of one side.
    """
    for weight in shape.weights:
        if weight.megatron.endswith(".weight") and is_adapted(weight, targets):
            sizes = weight_shapes(weight, shape=shape)
            outputs, inputs = sum(size[0] for size in sizes), sizes[0][1]
            yield weight, *((inputs, outputs) if weight.cut == "columns" else (outputs, inputs))


def target_problems(shape: ModelShape, targets: Collection[str], *, key: str = "lora") -> list[str]:
    """List why linears cannot have adapters; key: of the section that asks for them."""
    if shape.delta is not None:
        return [
            f"{key}: adapters of {shape.architecture} are not supported, because targets would be "
            f"linears of its attention layers alone, one of four; unset {key}"
        ]
    if shape.latent is None or "qkv" not in targets:
        return []
    others = [target for target in targets if target != "qkv"]
    return [
        f"{key}.targets={list(targets)}: the model's latent attention has no linear for queries, "
        f"keys and values together; set it to {others or ['proj']}"
    ]


def are_in_experts_only(shape: ModelShape, targets: Collection[str]) -> bool:
    """Return True if only linears of experts have adapters."""
    return all(weight.part == "expert" for weight, *_ in adapted_linears(shape, targets))


def count_adapter_parameters(shape: ModelShape, *, rank: int, targets: Collection[str]) -> int:
    """Count the parameters of all adapters of a model."""
    total = 0
    for weight, cut, whole in adapted_linears(shape, targets):
        copies = len(shape.layers_with(weight.layers))
        if weight.part == "expert":
            assert shape.experts is not None, "experts without a shape"
            copies *= shape.experts.num_experts
        total += copies * rank * (cut + whole)
    return total


def adapters_of_experts(shape: ModelShape, targets: Collection[str]) -> str | None:
    """Name the adapters that a grouped product of experts excludes; None without such adapters."""
    if shape.experts is None or not {"fc1", "fc2"} & set(targets):
        return None
    return "adapters of experts (fc1 or fc2 in lora.targets)"


def slot_rank(rank: int) -> int:
    """Return the rank of vLLM's slots for adapters of this rank, which are padded with zeros."""
    return next(each for each in SLOT_RANKS if each >= rank)


def slot_elements(
    shape: ModelShape, *, rank: int, targets: Collection[str], tensor: int = 1
) -> int:
    """Count the elements of one slot on one of `tensor` vLLM ranks.

    q, k and v each have an A, and so do gate and up. With fewer key-value heads than ranks their
    copies are not counted.
    """
    total = 0
    for weight, cut, whole in adapted_linears(shape, targets):
        factors = whole * (1 if weight.cut == "columns" else len(weight.hf)) + cut // tensor
        total += len(shape.layers_with(weight.layers)) * factors
    return slot_rank(rank) * total


def engine_modules(shape: ModelShape, targets: Collection[str]) -> list[str]:
    """Return the last names of vLLM's modules that have adapters."""
    weights = [weight for weight, *_ in adapted_linears(shape, targets)]
    return sorted({weight.vllm.removesuffix(".weight").rpartition(".")[2] for weight in weights})


def engine_problems(shape: ModelShape, *, rank: int) -> list[str]:
    """List why vLLM cannot compute with adapters itself (`lora.push: adapters`)."""
    problems = []
    if rank > SLOT_RANKS[-1]:
        problems.append(
            f"lora.rank={rank} is above {SLOT_RANKS[-1]}, vLLM's largest with lora.push=adapters; "
            "lower it, or set lora.push to merged"
        )
    if shape.experts is not None:
        problems.append(
            "lora.push=adapters: the model has experts, which vLLM with adapters computes by "
            "kernels that a CPU lacks and that nothing here has run; set lora.push to merged"
        )
    return problems


ABOUT, FACTORS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.json"  # ours: the fingerprint of the model that the adapters belong to
# Other values of these settings make another function of A and B, or train other parameters.
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False,
    "lora_bias": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": None, "target_parameters": None,
    "layers_to_transform": None, "trainable_token_indices": None, "alora_invocation_tokens": None,
    "use_qalora": False,
}  # fmt: skip
# Settings that change neither: which modules were looked for, and how A and B were trained.
_IGNORED = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules",
    "layers_pattern", "megatron_core", "runtime_config", "eva_config", "qalora_group_size",
    "init_lora_weights",
)  # fmt: skip
# Values of init_lora_weights under which W stays as the model has it. All others (pissa, olora,
# loftq, corda, lora_ga) subtract the first B A from W, so that A and B belong to another W.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


_TARGETS = ("qkv", "proj", "fc1", "fc2")


class Linear(NamedTuple):
    """One linear of Megatron's: Hugging Face's modules that it consists of, and their sizes."""

    target: str
    modules: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int


def factor_name(module: str, factor: str) -> str:
    """Return the name of a factor, `lora_A` or `lora_B`, of a Hugging Face module in the file."""
    return f"base_model.model.{module}.{factor}.weight"


def peft_problem(shape: ModelShape, targets: Collection[str]) -> str | None:
    """Return why `peft` has no format for adapters of these targets; None if it has.

    transformers keeps all experts of a layer in one parameter, so that `peft` has no module for the
    adapter of one expert.
    """
    if adapters_of_experts(shape, targets) is None:
        return None
    return "peft has no format for adapters of single experts; use the merged model"


def list_linears(shape: ModelShape, targets: Collection[str]) -> list[Linear]:
    """List the linears with an adapter; raise ValueError if `peft` has no format for one."""
    if (problem := peft_problem(shape, targets)) is not None:
        raise UserError(problem)
    found = []
    for weight, *_ in adapted_linears(shape, targets):
        sizes = weight_shapes(weight, shape=shape)
        for layer in range(shape.num_layers):
            names = tuple(name.removesuffix(".weight").format(layer=layer) for name in weight.hf)
            target = weight.megatron.removesuffix(".weight").rpartition("_")[2]
            outputs = tuple(size[0] for size in sizes)
            found.append(Linear(target, names, outputs, sizes[0][1]))
    return found


def check_peft_folder(
    folder: str | Path,
    *,
    model: str | Path,
    shape: ModelShape,
    rank: int,
    alpha: float,
    targets: Collection[str],
) -> None:
    """Raise ValueError unless adapters of this rank, alpha and targets can start from a folder.

    A folder without the fingerprint of its model is compared by its shapes alone.
    """
    folder = Path(folder)
    about = _read_about(folder)
    _check_about(about, folder / ABOUT)
    linears = list_linears(shape, targets)
    problems = _tensor_problems(folder, linears, about["r"])
    if problems:
        modules = sorted({name.rpartition(".")[2] for each in linears for name in each.modules})
        raise UserError(
            f"{folder / FACTORS} does not fit lora.targets={list(targets)} of {model} ({modules}): "
            f"{format_problems(problems)}; {_suggest_targets(folder, shape, targets)}"
        )
    blocks = max(_count_blocks(folder / FACTORS, each) for each in linears)
    needed, scale = about["r"] * blocks, about["lora_alpha"] / about["r"]
    if rank < needed or alpha / rank != scale:
        shared = f", and modules of one linear have {blocks} different A" * (blocks > 1)
        raise UserError(
            f"{folder / ABOUT} has r={about['r']} and lora_alpha={about['lora_alpha']:g}{shared}, "
            f"which lora.rank={rank}, lora.alpha={alpha:g} cannot continue; set lora.rank to "
            f"{needed} and lora.alpha to {needed * scale:g}, or both to the same multiple of these"
        )
    stored = read_base(folder)
    if stored is not None and stored != model_fingerprint(model):
        raise UserError(
            f"{folder} contains adapters of another model than {model}: {BASE} has the fingerprint "
            f"{stored[:12]}; set model.path to the model that they were "
            "trained on"
        )


def _read_about(folder: Path) -> dict[str, Any]:
    for name in (ABOUT, FACTORS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}; give a folder that save_pretrained of the peft library "
                "wrote, or RUN/adapter"
            )
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        assert about["r"] > 0 and about["lora_alpha"] > 0
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(
            f"{folder / ABOUT} must be a JSON object with positive r and lora_alpha; write it again"
        ) from None
    return about


def _check_about(about: dict[str, Any], file: Path) -> None:
    """Raise UserError if adapter_config.json describes more than plain adapters of linears."""
    if (start := about.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise UserError(
            f"{file} has init_lora_weights={start}, which changed the model's own weights: these "
            "adapters do not belong to the model as published; save them as plain ones by peft's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge them "
            "into model.path"
        )
    wrong = []
    for key, value in about.items():
        is_off = key != "peft_type" and (value is None or value is False or value in ("", [], {}))
        if key not in _IGNORED and not is_off and value != PLAIN.get(key):
            wrong.append(f"{key}={value}")
    if wrong:
        raise UserError(
            f"{file} has {', '.join(wrong)}; plain adapters of linears are supported "
            "alone: merge it into model.path instead"
        )


def _suggest_targets(folder: Path, shape: ModelShape, targets: Collection[str]) -> str:
    """Return what to do with a folder whose factors are not those of `targets`."""
    possible = [target for target in _TARGETS if peft_problem(shape, [target]) is None]
    owners = {
        module: each.target for each in list_linears(shape, possible) for module in each.modules
    }
    names = read_header(folder / FACTORS)
    modules = {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0] or name for name in names
    }
    if others := sorted({name.rpartition(".")[2] for name in modules if name not in owners}):
        return f"{', '.join(others)} cannot have adapters here: merge it into model.path instead"
    found = [target for target in possible if target in {owners[name] for name in modules}]
    if set(found) == set(targets):
        return "set model.path to the model that it belongs to"
    return f"set lora.targets to {found}"


def _tensor_problems(folder: Path, linears: list[Linear], rank: int) -> list[str]:
    header = read_header(folder / FACTORS)
    problems, wanted = [], {}
    for linear in linears:
        present = modules_in(header, linear)
        for module, outputs in zip(linear.modules, linear.outputs, strict=True):
            if present and module not in present:
                continue
            wanted[factor_name(module, "lora_A")] = [rank, linear.inputs]
            wanted[factor_name(module, "lora_B")] = [outputs, rank]
    problems += [f"{name} is missing" for name in wanted if name not in header]
    problems += [f"{name} is not expected" for name in header if name not in wanted]
    for name, size in wanted.items():
        if name not in header:
            continue
        if header[name]["shape"] != size:
            problems.append(f"{name} has shape {header[name]['shape']} instead of {size}")
        elif (dtype := header[name]["dtype"]) not in FLOATS:
            problems.append(f"{name} has dtype {dtype}")
    return problems


def modules_in(names: Container[str], linear: Linear) -> list[str]:
    """Return the modules of a linear that a file has; other modules' adapters start with B = 0."""
    both = ("lora_A", "lora_B")
    return [
        module
        for module in linear.modules
        if any(factor_name(module, factor) in names for factor in both)
    ]


def _count_blocks(file: Path, linear: Linear) -> int:
    """Count the different A of a linear's modules."""
    header, found = read_header(file), set()
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        for module in modules_in(header, linear):
            first, last = header[factor_name(module, "lora_A")]["data_offsets"]
            stream.seek(start + first)
            found.add(stream.read(last - first))
    return len(found)


def write_base(folder: Path, *, model: str | Path) -> None:
    """Write the fingerprint of the model that the adapters belong to."""
    (folder / BASE).write_text(
        json.dumps({"fingerprint": model_fingerprint(model)}) + "\n", encoding="utf-8"
    )


def read_base(folder: Path) -> str | None:
    """Return the fingerprint of the model that the adapters belong to; None if not recorded."""
    if not (folder / BASE).is_file():
        return None
    return str(json.loads((folder / BASE).read_text(encoding="utf-8")).get("fingerprint"))
