"""Tensors as files have them: some contain the matrices of all experts, each transposed.

Everything that moves weights names and cuts the matrices [out, in] of single experts
(`shape.tensor_shapes`). Files of some architectures have one tensor [experts, in, out] for all of
them. Reading, writing and vLLM's loaders are where the two meet: as views, so that no copy is made.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.models.shape import ModelShape, tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor


class Stored(NamedTuple):
    """Where a file has a weight: the tensor, and the expert's index in its first dimension."""

    tensor: str
    expert: int


def stored_places(shape: ModelShape) -> dict[str, Stored]:
    """Return the places of all weights that files have inside a tensor of all experts."""
    places: dict[str, Stored] = {}
    for weight in shape.weights:
        if weight.stored is None:
            continue
        assert shape.experts is not None, "experts without a shape"
        (name,) = weight.hf
        for layer in range(shape.num_layers):
            tensor = weight.stored.format(layer=layer)
            for expert in range(shape.experts.num_experts):
                places[name.format(layer=layer, expert=expert)] = Stored(tensor, expert)
    return places


def stored_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the model's safetensors files, by Hugging Face name."""
    places, shapes = stored_places(shape), dict[str, tuple[int, ...]]()
    for name, size in tensor_shapes(shape).items():
        if name not in places:
            shapes[name] = size
        elif shape.experts is not None:
            shapes[places[name].tensor] = (shape.experts.num_experts, *reversed(size))
    return shapes


def view_stored(tensors: Mapping[str, "Tensor"], shape: ModelShape) -> dict[str, "Tensor"]:
    """Return every weight by its name in plans, as views of the tensors of files."""
    places = stored_places(shape)
    whole = {place.tensor for place in places.values()}
    views = {name: tensor for name, tensor in tensors.items() if name not in whole}
    for name, (tensor, expert) in places.items():
        if tensor in tensors:
            views[name] = tensors[tensor][expert].t()  # a vector stays as it is
    return views
