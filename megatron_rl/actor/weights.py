"""Import of Hugging Face safetensors, one rectangle at a time, under any layout.

Ranks with equal parameters read a share of them each and send it to the others, so that such ranks
together read every byte once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_rl.distributed.agreement import sync_errors_across_ranks
from megatron_rl.distributed.collectives import Group, group_rank, group_size
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import find_files
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.stored_tensors import (
    Stored,
    check_headers,
    stored_places,
    stored_shapes,
)
from megatron_rl.models.weights import VALUE_HEAD
from megatron_rl.resharding.layouts import has_fused_names, layout_of
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.transfer import check_parameters

ProgressCallback = Callable[[int, int], None]  # (done, total)
ADAPTER = ".lora_"  # in the names of the factors of adapters, and of no other parameter
BUFFER = ".expert_bias"  # of routers: the one buffer that is part of a model


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


class HfReader:
    """Reader of tensor slices in a Hugging Face folder; keeps files open but caches no data.

    shape: needed to read weights that files have under other names or in tensors of all experts.
    """

    def __init__(self, folder: str | Path, shape: ModelShape | None = None) -> None:
        self.folder = Path(folder)
        self.places: dict[str, Stored] = {} if shape is None else stored_places(shape)
        self._open: dict[str, Any] = {}
        self.files = find_files(folder)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]

    def slice(self, name: str) -> Any:
        """Return a lazy view of one tensor, which supports indexing."""
        return self._file(self.files[name]).get_slice(name)

    def rectangle(self, name: str, rows: Any, columns: Any) -> Tensor:
        """Return slices of a weight: [height, width], of a vector [height].

        rows, columns: slices with start and stop.
        """
        place = self.places.get(name, Stored(name))
        view = self.slice(place.tensor)
        dimensions = len(view.get_shape())
        if place.expert is not None:
            if dimensions == 2:
                return view[place.expert, rows]
            if place.transposed:
                return view[place.expert, columns, rows].t()
            rows = slice(place.first + rows.start, place.first + rows.stop)
            return view[place.expert, rows, columns]
        if dimensions == 1:
            return view[rows]
        return view[rows, columns] if dimensions == 2 else view[rows, :, columns].flatten(0, 1)

    def file(self, name: str) -> Path:
        """Return the file that has a weight."""
        return self.folder / self.files[self.places.get(name, Stored(name)).tensor]

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        view = self.slice(name)
        return view[tuple(slice(0, 1) for _ in view.get_shape())].dtype

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError naming tensors that are missing or have another shape."""
        check_headers(self.folder, shape)


def stored_dtypes(folder: str | Path, shape: ModelShape) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor in a model folder.

    By the names of tensors in files, and of weights that files have elsewhere (`stored_places`). A
    value head that no file has yet gets the dtype of the embeddings.
    """
    reader, names = HfReader(folder), [*stored_shapes(shape)]
    head = VALUE_HEAD.hf[0]
    is_new = head in names and head not in reader.files
    dtypes = {name: reader.dtype(names[0] if is_new and name == head else name) for name in names}
    places = stored_places(shape).items()
    return dtypes | {name: dtypes[place.tensor] for name, place in places}


def named_parameters(chunks: Sequence[Module], *, adapters: bool = False) -> dict[str, Tensor]:
    """Return a rank's parameters by Megatron name, prefixed by `chunk{i}.` if several chunks.

    The biases by which routers choose experts are among them, although Megatron keeps them as
    buffers. adapters: return the parameters of the adapters (LoRA) instead of the model's.
    """
    prefixes = [f"chunk{index}." if len(chunks) > 1 else "" for index in range(len(chunks))]
    return {
        prefix + name: parameter
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for name, parameter in (*chunk.named_parameters(), *chunk.named_buffers())
        if (ADAPTER in name) == adapters
        and (isinstance(parameter, Parameter) or (name.endswith(BUFFER) and not adapters))
    }


def load_model(
    chunks: Sequence[Module], *, shape: ModelShape, topology: Topology, folder: str | Path
) -> None:
    """Load this rank's chunks from a Hugging Face folder."""
    load_weights(named_parameters(chunks), shape=shape, topology=topology, folder=folder)


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise FloatingPointError if a parameter is not finite, naming the first such parameter."""
    norms = torch.stack(torch._foreach_norm(list(parameters.values()), math.inf))
    finite = torch.isfinite(norms).tolist()
    bad = [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]
    if bad:
        raise FloatingPointError(
            f"{len(bad)} parameters are not finite, first {bad[0]}; resume from the last "
            "checkpoint, which is still finite, with a lower optimizer.learning_rate"
        )


def read_piece(reader: HfReader, piece: Piece) -> Tensor:
    """Read the rectangle of a piece from its file; [height, width].

    Raises ValueError if it contains NaN or infinity: the model folder is then at fault, and not a
    checkpoint of the run.
    """
    values = reader.rectangle(piece.tensor, slice(*piece.rows), slice(*piece.columns))
    values = values.unsqueeze(1) if values.dim() == 1 else values
    if not torch.isfinite(values).all():
        raise UserError(
            f"{reader.file(piece.tensor)}: {piece.tensor} has values that are not "
            "finite: the model folder is broken; download, copy or export it again"
        )
    return values


def choose_readers(
    parameters: Mapping[str, Tensor], topology: Topology
) -> dict[str, tuple[Group, int]]:
    """Choose who reads each parameter: its group of ranks with equal values, and a rank of that.

    The ranks of a group read about equally many bytes.
    """
    readers: dict[str, tuple[Group, int]] = {}
    loads: dict[Group, list[int]] = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, name)):
        # Megatron's mark of parameters whose gradients are summed over other ranks.
        is_expert = not getattr(parameters[name], "allreduce", True)
        group = topology.expert_dp_group if is_expert else topology.dp_cp_group
        load = loads.setdefault(group, [0] * group_size(group))
        readers[name] = group, load.index(min(load))
        load[readers[name][1]] += parameters[name].nbytes
    return readers


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    topology: Topology,
    folder: str | Path,
    progress: ProgressCallback = ignore_progress,
) -> None:
    """Load this rank's parameters from a Hugging Face folder; vocabulary padding becomes zero.

    Collective. progress: called with the numbers of finished and total steps. Raises
    ValueError if a tensor or a parameter is missing, extra or of the wrong shape, and an error of
    any rank on all of them.
    """
    with sync_errors_across_ranks(doing=f"reading {folder}"):
        reader = HfReader(folder, shape)
        reader.check(shape)
        layout = layout_of(topology)
        pieces = layout.pieces(shape, rank=topology.rank, fused=has_fused_names(parameters))
        check_parameters(parameters, pieces, layout=layout)
        readers = choose_readers(parameters, topology)
        own = {name for name, (group, rank) in readers.items() if group_rank(group) == rank}
        for name in own:
            if "word_embeddings" in name or "output_layer" in name:
                parameters[name].zero_()
        own_pieces = [piece for piece in pieces if piece.parameter in own]
        total = len(own_pieces) + len(readers)
        for done, piece in enumerate(own_pieces, start=1):
            values = read_piece(reader, piece)
            piece.of_parameter(parameters[piece.parameter]).copy_(values)
            progress(done, total)
    for done, (name, (group, rank)) in enumerate(readers.items(), start=len(own_pieces) + 1):
        if group_size(group) > 1:
            dist.broadcast(parameters[name].detach(), group=group, group_src=rank)
        progress(done, total)
