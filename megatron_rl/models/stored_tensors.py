"""Tensors as files have them: under other names, or with the matrices of all experts in one.

Everything that moves weights names and cuts the text model's tensors [out, in], of experts one by
one (`shape.tensor_shapes`). Files of some architectures have one tensor [experts, in, out] for all
experts. Published models with a vision tower have `model.language_model.` in their names, and
experts in one tensor [experts, out, in], gate above up. Reading, writing and vLLM's loaders are
where both meet: as views, so that no copy is made.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import (
    DOWNLOAD_AGAIN,
    EXPERTS_IN_ONE,
    FLOATS,
    INDEX,
    find_files,
    format_problems,
    read_header,
    read_values,
    stale_index,
)
from megatron_rl.models.shape import ModelShape, ModelTensor, each_tensor
from megatron_rl.models.weights import EMBEDDING, OUTPUT_LAYER

if TYPE_CHECKING:
    from torch import Tensor

_TEXT, _IN_WRAPPER = "model.", "model.language_model."


class Stored(NamedTuple):
    """A weight's place in a file: the tensor and, for stacked experts, the part of that tensor.

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
    for name, entry in _unread(_read_entries(folder), shape).items():
        yield name, tuple(entry.header["shape"])


class Entry(NamedTuple):
    """A tensor of a folder: its file, and its entry in the file's header."""

    file: Path
    header: dict[str, Any]


def _read_entries(folder: str | Path) -> dict[str, Entry]:
    """Return every tensor of a folder's files, also those that an index does not list.

    transformers reads them too. Raises ValueError for one that two files have.
    """
    folder, files = Path(folder), find_files(folder)
    entries: dict[str, Entry] = {}
    for file in sorted(set(files.values())):
        for name, header in read_header(folder / file).items():
            if name in entries:
                raise UserError(
                    f"{folder} has {name} in {entries[name].file.name} and in {file}; remove one"
                )
            entries[name] = Entry(folder / file, header)
    return entries


def _unread(entries: Mapping[str, Entry], shape: ModelShape) -> dict[str, Entry]:
    """Return the tensors that are not read; the output layer of tied embeddings is compared."""
    known = {*stored_shapes(shape), *OUTPUT_LAYER.hf}
    return {name: one for name, one in entries.items() if name not in known}


def describe_unread(folder: str | Path, shape: ModelShape) -> list[str]:
    """Describe, in a line each, a stale index and the tensors of a folder that nothing reads."""
    lines = [line] if (line := stale_index(folder)) else []
    unread = {} if shape.wrapper else _unread(_read_entries(folder), shape)
    if unread:
        kinds = Counter(re.sub(r"\d+", "N", name) for name in unread)
        listed = [f"{name} ({n})" for name, n in kinds.most_common(5)]
        lines.append(
            f"{folder}: {len(unread)} tensors are not read, as they are no part of "
            f"{shape.architecture}: {', '.join(listed)}{', ...' if len(kinds) > 5 else ''}"
        )
    return lines


def check_headers(folder: str | Path, shape: ModelShape) -> None:
    """Raise ValueError naming tensors that are missing or have another shape or dtype.

    And those that would make another model: another output layer than the tied embeddings, and
    further weights, such as a bias, of the modules that are read.
    """
    folder, entries, wanted = Path(folder), _read_entries(folder), stored_shapes(shape)
    missing, mismatched = [], []
    for name, size in wanted.items():
        entry = entries.get(name)
        if entry is None:
            missing.append(name)
        elif (stored := tuple(entry.header["shape"])) != size:
            mismatched.append(f"{name} has shape {stored}, but config.json requires {size}")
        elif (dtype := entry.header["dtype"]) not in FLOATS:
            mismatched.append(f"{name} has dtype {dtype}: quantized weights are not supported")
    if missing or mismatched:
        suggestions = [_cure_of_missing(missing, entries, wanted)] * bool(missing)
        suggestions += ["config.json and weights must be of one model, not quantized"] * bool(
            mismatched
        )
        problems = format_problems([f"{name} is missing" for name in missing] + mismatched)
        raise UserError(f"weights in {folder}: {problems}; {'; '.join(suggestions)}")
    files = find_files(folder)
    if moved := [name for name in wanted if files.get(name) != entries[name].file.name]:
        raise UserError(
            f"{folder}: {moved[0]} is in {entries[moved[0]].file.name}, but not by {INDEX}; write "
            "both again by save_pretrained of transformers"
        )
    modules = {name.rpartition(".")[0] for name in (*wanted, *OUTPUT_LAYER.hf)}
    if further := [name for name in _unread(entries, shape) if name.rpartition(".")[0] in modules]:
        raise UserError(
            f"weights in {folder}: {shape.architecture} has no {format_problems(further)}, so "
            "the file is of another model, or was trained with what transformers and vLLM do not "
            "compute; name its architecture in config.json, or remove these tensors"
        )
    if shape.head == "tokens":
        _check_output_layer(folder, entries, wanted)


def _check_output_layer(
    folder: Path, entries: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError for another output layer in the files of a model with tied embeddings."""
    head, *_ = OUTPUT_LAYER.hf
    if head not in entries or head in wanted:
        return
    name = next(name for name in wanted if name.endswith(EMBEDDING.hf[0].removeprefix(_TEXT)))
    first, second = entries[name], entries[head]
    if first.header["shape"] != second.header["shape"] or not all(
        map(np.array_equal, read_values(*first), read_values(*second))
    ):
        raise UserError(
            f"{folder}: config.json has tie_word_embeddings=true, but {head} is stored with other "
            f"values than {name}, and transformers and vLLM use it; set tie_word_embeddings to "
            "false in config.json, or remove the tensor from the file"
        )


def _cure_of_missing(
    missing: Sequence[str], entries: Mapping[str, Entry], wanted: Mapping[str, Any]
) -> str:
    """Suggest a cure by how the names that are stored differ from those that are missing."""
    head = OUTPUT_LAYER.hf[0]
    if head in entries and head not in wanted and all("embed_tokens" in one for one in missing):
        return (
            f"the embeddings are tied, and only {head} is stored: store it as {missing[0]}, as "
            "save_pretrained of transformers does after from_pretrained"
        )
    unread = [name for name in entries if name not in wanted]
    parts = {part for name in unread for part in name.split(".")}
    more = parts - {part for name in wanted for part in name.split(".")}
    shorter = {".".join(p for p in name.split(".") if p not in more): name for name in unread}
    if longer := [name for name in unread if name.endswith(f".{missing[0]}")]:
        shorter[missing[0]] = longer[0]
    if same := [name for name in missing if name in shorter]:
        wrapped = shorter[same[0]]
        used = [one for one in wrapped.split(".") if one in more] or [wrapped.split(".")[0]]
        return (
            f"the file has {wrapped} instead of {same[0]}: it was saved from a wrapped "
            f"model ({', '.join(used)}); save the model inside (_orig_mod of torch.compile, module "
            "of DistributedDataParallel; merge_and_unload of PEFT), or rename its tensors"
        )
    if pairs := [(name, one) for name in missing for one in unread if name.endswith(f".{one}")]:
        name, one = pairs[0]
        return (
            f"the file has {one} instead of {name}: it was saved from the model without its head; "
            "save the one with a head (AutoModelForCausalLM), or rename its tensors"
        )
    return f"a file may be missing: {DOWNLOAD_AGAIN}"
