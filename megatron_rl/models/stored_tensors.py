"""Tensors as files have them: under other names, or with the matrices of all experts in one.

Everything that moves weights names and cuts the text model's tensors [out, in], of experts one by
one (`shape.tensor_shapes`). Files of some architectures have one tensor [experts, in, out] for all
experts. Published models with a vision tower have `model.language_model.` in their names, and
experts in one tensor [experts, out, in], gate above up. Reading, writing and vLLM's loaders are
where both meet: as views, so that no copy is made.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import (
    DOWNLOAD_AGAIN,
    EXPERTS_IN_ONE,
    FLOATS,
    find_files,
    format_problems,
    read_header,
)
from megatron_rl.models.shape import ModelShape, ModelTensor, each_tensor
from megatron_rl.models.weights import OUTPUT_LAYER

if TYPE_CHECKING:
    from torch import Tensor

_TEXT, _IN_WRAPPER = "model.", "model.language_model."


class Stored(NamedTuple):
    """Where a file has a weight: the tensor and, if it is one of experts, which part of that.

    first: row of the expert's matrix. transposed: the matrix is [in, out].
    """

    tensor: str
    expert: int | None = None
    first: int = 0
    transposed: bool = False


def stored_places(shape: ModelShape) -> dict[str, Stored]:
    """Return the places of all weights that files do not have as tensors of the same names."""
    places = {each.name: _place(each, shape) for each in each_tensor(shape)}
    return {name: place for name, place in places.items() if place.tensor != name}


def _place(each: ModelTensor, shape: ModelShape) -> Stored:
    name = each.name
    if shape.wrapper is not None and name.startswith(_TEXT):
        name = _IN_WRAPPER + name.removeprefix(_TEXT)
    if each.kind.stored is not None:
        tensor = each.kind.stored.format(layer=each.layer)
        return Stored(tensor, each.expert, transposed=True)
    if each.kind.part != "expert" or not shape.fused_experts:
        return Stored(name)
    tensor, _, rest = name.partition(f".mlp.experts.{each.expert}.")
    kind = EXPERTS_IN_ONE if each.kind.cut == "gate_up" else f".mlp.experts.{rest.split('.')[0]}"
    return Stored(tensor + kind, each.expert, first=each.number * each.size[0])


def stored_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the model's safetensors files, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in each_tensor(shape):
        place, size = _place(each, shape), each.size
        if place.expert is not None:
            assert shape.experts is not None, "experts without a shape"
            height = place.first + size[0]  # up is below gate
            size = tuple(reversed(size)) if place.transposed else (height, *size[1:])
            size = (shape.experts.num_experts, *size)
        shapes[place.tensor] = size
    return shapes


def has_transposed_experts(shape: ModelShape) -> bool:
    """Return whether files have one tensor of all experts, each transposed, as of gpt-oss."""
    return any(weight.stored is not None for weight in shape.weights)


def view_stored(tensors: Mapping[str, "Tensor"], shape: ModelShape) -> dict[str, "Tensor"]:
    """Return every weight by its name in plans, as views of the tensors of files."""
    views: dict[str, Tensor] = {}
    for each in each_tensor(shape):
        place = _place(each, shape)
        if (whole := tensors.get(place.tensor)) is None:
            continue
        if place.expert is not None:
            whole = whole[place.expert]
            rows = slice(place.first, place.first + each.size[0])
            whole = whole.t() if place.transposed else whole[rows]  # a vector stays as it is
        views[each.name] = whole
    return views


def further_tensors(folder: str | Path, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what a folder has besides a wrapped text model, such as its vision tower, with sizes.

    Of a text model by itself, nothing.
    """
    if shape.wrapper is None:
        return
    known, files = {*stored_shapes(shape), *OUTPUT_LAYER.hf}, find_files(folder)
    headers = {name: read_header(Path(folder) / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in known:
            yield name, tuple(headers[file][name]["shape"])


def check_headers(folder: str | Path, shape: ModelShape) -> None:
    """Raise ValueError naming tensors that are missing or have another shape or dtype."""
    folder = Path(folder)
    files = find_files(folder)
    headers = {name: read_header(folder / name) for name in sorted(set(files.values()))}
    missing, mismatched = [], []
    for name, size in stored_shapes(shape).items():
        entry = headers[files[name]].get(name) if name in files else None
        if entry is None:
            missing.append(f"{name} is missing")
        elif (stored := tuple(entry["shape"])) != size:
            mismatched.append(f"{name} has shape {stored}, but config.json requires {size}")
        elif (dtype := entry["dtype"]) not in FLOATS:
            mismatched.append(f"{name} has dtype {dtype}: quantized weights are not supported")
    if missing or mismatched:
        suggestions = [f"a file may be missing: {DOWNLOAD_AGAIN}"] * bool(missing)
        suggestions += ["config.json and weights must be of one model, not quantized"] * bool(
            mismatched
        )
        problems = format_problems(missing + mismatched)
        raise UserError(f"weights in {folder}: {problems}; {'; '.join(suggestions)}")
