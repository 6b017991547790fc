"""Checks of weights that the engine receives, and vLLM's loaders for them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.models.stored_tensors import has_transposed_experts, stored_places

PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON")


def check_tensors(
    weights: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; raise ValueError if one is missing, duplicated or of another shape."""
    missing = tensor_shapes(shape)
    for name, tensor in weights:
        size = missing.pop(name, None)
        if size is None:
            raise ValueError(f"{name} was received twice or is not a weight of the model")
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {size}")
        yield name, tensor
    if missing:
        raise ValueError(f"weights were not received: {sorted(missing)}")


def prepare_tensors(
    weights: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Yield checked weights as vLLM's loaders expect them.

    Matrices that files have in a tensor of all experts are transposed there.
    """
    places = stored_places(shape)
    for name, tensor in check_tensors(weights, shape):
        yield name, tensor.t() if name in places and places[name].transposed else tensor


def load_tensors(llm: Any, weights: Iterable[tuple[str, Tensor]], **about: Any) -> None:
    """Load all weights through vLLM's loaders; `about` has the fields of `InprocUpdateInfo`."""
    with without_wrappers(llm):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights": weights, **about}})
        llm.finish_weight_update()


@contextmanager
def without_wrappers(llm: Any) -> Iterator[torch.nn.Module]:
    """Yield vLLM's model; inside the block it has the linears themselves that adapters wrap.

    Loaders and tables know the names of parameters without adapters.
    """
    model: torch.nn.Module
    (model,) = llm.apply_model(lambda model: model)
    manager = getattr(model, "lora_manager", None)
    places = {} if manager is None else {
        name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], wrapper)
        for name, wrapper in manager.modules.items()
    }  # fmt: skip
    try:
        for parent, name, wrapper in places.values():
            setattr(parent, name, wrapper.base_layer)
        yield model
    finally:
        for parent, name, wrapper in places.values():
            setattr(parent, name, wrapper)


def parameters_as_expected(
    llm: Any, expected: dict[str, tuple[int, ...]], *, shape: ModelShape, dtype: torch.dtype
) -> Mapping[str, Tensor] | None:
    """Return vLLM's own parameters if they are as expected and in plain order, else None.

    Compares names, shapes and dtype, and requires expert kernels that compute with the experts as
    they are loaded.
    """
    if shape.tied_embeddings:
        expected.pop("lm_head.weight")  # the same parameter, listed once
    with without_wrappers(llm) as model:
        parameters = dict(model.named_parameters())
    if has_transposed_experts(shape):  # on ranks other than the first, loaders set a bias to zero
        return None
    as_expected = parameters.keys() == expected.keys() and all(
        tuple(parameters[name].shape) == size
        and parameters[name].dtype in (dtype, torch.float32)  # of some routers, in any model
        and parameters[name].is_contiguous()
        for name, size in expected.items()
    )
    return parameters if as_expected and has_plain_experts(model) else None


def has_plain_experts(model: torch.nn.Module) -> bool:
    """Return whether vLLM's kernels use all experts in the order in which they are loaded.

    Triton's kernels do; other kernels swap or interleave rows (vllm's
    fused_moe/oracle/unquantized.py).
    """
    experts = [module for module in model.modules() if hasattr(module, "w13_weight")]
    methods = [getattr(module, "quant_method", None) for module in experts]
    backends = [getattr(method, "unquantized_backend", None) for method in methods]
    return all(getattr(backend, "name", None) in PLAIN_BACKENDS for backend in backends)
