"""Import and export of Hugging Face safetensors, one rectangle at a time, under any layout.

Loading reads only this rank's slices. Export processes the tensors in order: rank 0 receives each
tensor's rectangles from their owners and writes a file when SHARD_BYTES are collected, so no rank
ever has the whole model in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from megatron_rl.actor.checkpoint_contents import FOLDER, check_stored, is_checkpoint, read_dtypes
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import INDEX, SINGLE, check_headers, find_files
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import has_fused_names, layout_of
from megatron_rl.resharding.pieces import Piece
from megatron_rl.resharding.verify import check_parameters

SHARD_BYTES = 4 << 30
ProgressCallback = Callable[[int, int], None]  # (done, total)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


def _ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


class HfReader:
    """Reader of tensor slices in a Hugging Face folder; keeps files open but caches no data."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self.files = find_files(folder)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]

    def slice(self, name: str) -> Any:
        """Return a lazy view of one tensor, which supports indexing."""
        return self._file(self.files[name]).get_slice(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        view = self.slice(name)
        return view[tuple(slice(0, 1) for _ in view.get_shape())].dtype

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError naming tensors that are missing or have another shape."""
        check_headers(self.folder, shape)


def check_weights(folder: str | Path, shape: ModelShape) -> None:
    """Raise ValueError naming tensors that the folder lacks or has in another shape."""
    if is_checkpoint(Path(folder) / FOLDER):
        check_stored(Path(folder) / FOLDER, shape)
    else:
        check_headers(folder, shape)


def stored_dtypes(folder: str | Path, shape: ModelShape) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor in a model folder with safetensors or a checkpoint."""
    if is_checkpoint(Path(folder) / FOLDER):
        return read_dtypes(Path(folder) / FOLDER)
    reader = HfReader(folder)
    return {name: reader.dtype(name) for name in tensor_shapes(shape)}


def named_parameters(chunks: Sequence[Module]) -> dict[str, Tensor]:
    """Return a rank's parameters by Megatron name, prefixed by `chunk{i}.` if several chunks."""
    if len(chunks) == 1:
        return dict(chunks[0].named_parameters())
    return {
        f"chunk{index}.{name}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def read_piece(reader: HfReader, piece: Piece) -> Tensor:
    """Read the rectangle of a piece from its file; [height, width].

    Raises ValueError if it contains NaN or infinity: the model folder is then at fault, and not a
    checkpoint of the run.
    """
    view = reader.slice(piece.tensor)
    rows = slice(*piece.rows)
    is_vector = len(view.get_shape()) == 1
    values: Tensor = view[rows].unsqueeze(1) if is_vector else view[rows, slice(*piece.columns)]
    if not torch.isfinite(values).all():
        raise UserError(
            f"{reader.folder / reader.files[piece.tensor]}: {piece.tensor} has values that are not "
            "finite: the model folder is broken; download, copy or export it again"
        )
    return values


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    topology: Topology,
    folder: str | Path,
    progress: ProgressCallback = _ignore_progress,
) -> None:
    """Load this rank's parameters from a Hugging Face folder; vocabulary padding becomes zero.

    progress: called with the numbers of finished and total pieces. Raises ValueError if a tensor or
    a parameter is missing, extra or of the wrong shape.
    """
    reader = HfReader(folder)
    reader.check(shape)
    layout = layout_of(topology)
    pieces = layout.pieces(shape, rank=topology.rank, fused=has_fused_names(parameters))
    check_parameters(parameters, pieces, layout=layout)
    for name, parameter in parameters.items():
        if "word_embeddings" in name or "output_layer" in name:
            parameter.zero_()
    for done, piece in enumerate(pieces, start=1):
        piece.of_parameter(parameters[piece.parameter]).copy_(read_piece(reader, piece))
        progress(done, len(pieces))


def _owners(
    shape: ModelShape, topology: Topology, *, fused: bool
) -> dict[str, list[tuple[int, Piece]]]:
    """Map every HF tensor to rectangles that tile it, each with the first rank that has it."""
    layout = layout_of(topology)
    owners: dict[str, dict[tuple, tuple[int, Piece]]] = {name: {} for name in tensor_shapes(shape)}
    for rank in range(topology.world_size):
        for piece in layout.pieces(shape, rank=rank, fused=fused):
            owners[piece.tensor].setdefault((piece.rows, piece.columns), (rank, piece))
    return {name: list(tiles.values()) for name, tiles in owners.items()}


class _ShardWriter:
    """Writer on rank 0 that collects tensors and writes a file when they reach SHARD_BYTES."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.bytes = self.total = 0
        self.files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.bytes + size > SHARD_BYTES:
            self.flush()
        self.pending[name] = tensor
        self.bytes += size
        self.total += size

    def flush(self) -> None:
        path = self.folder / f"part-{len(self.files):05d}.safetensors"
        save_file(self.pending, path, metadata={"format": "pt"})
        self.files.append((path, list(self.pending)))
        self.pending, self.bytes = {}, 0

    def finish(self) -> None:
        """Rename the files as transformers expects; write an index if there are several."""
        if self.pending:
            self.flush()
        if len(self.files) == 1:
            self.files[0][0].rename(self.folder / SINGLE)
            return
        weight_map = {}
        for index, (path, names) in enumerate(self.files, start=1):
            name = f"model-{index:05d}-of-{len(self.files):05d}.safetensors"
            path.rename(self.folder / name)
            weight_map.update(dict.fromkeys(names, name))
        content = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def export_weights(
    parameters: Mapping[str, Tensor],
    *,
    shape: ModelShape,
    topology: Topology,
    source: str | Path,
    folder: str | Path,
    progress: ProgressCallback = _ignore_progress,
) -> None:
    """Write a Hugging Face folder; config and tokenizer files are copied from `source`.

    Collective over all ranks: every rank executes the same transfers in the same order. Every
    tensor keeps its dtype in `source`. The folder appears under its final name only when complete.
    progress: called with the numbers of finished and total tensors.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    sizes, dtypes = tensor_shapes(shape), stored_dtypes(source, shape)
    writer = None
    if topology.rank == 0:
        begin_folder(partial, source)
        writer = _ShardWriter(partial)
    owners = _owners(shape, topology, fused=has_fused_names(parameters))
    for done, (name, tiles) in enumerate(owners.items(), start=1):
        dtype = dtypes[name]
        whole = torch.empty(sizes[name], dtype=dtype) if writer else None
        for rank, piece in tiles:
            part = _move(piece, parameters, rank=rank, topology=topology, dtype=dtype)
            if whole is not None and part is not None:
                piece.of_tensor(whole).copy_(part)
        if writer is not None and whole is not None:
            writer.add(name, whole)
        progress(done, len(sizes))
    if writer is not None:
        writer.finish()
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    if topology.world_size > 1:
        dist.barrier()


def begin_folder(partial: Path, source: str | Path) -> None:
    """Create a new folder with copies of all files of `source` except weights."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(path, partial / path.name)


def _move(
    piece: Piece,
    parameters: Mapping[str, Tensor],
    *,
    rank: int,
    topology: Topology,
    dtype: torch.dtype,
) -> Tensor | None:
    """Send the rectangle from its owner to rank 0 through the host; returns None elsewhere."""
    part = None
    if topology.rank == rank:
        view = piece.of_parameter(parameters[piece.parameter])
        part = view.to(device="cpu", dtype=dtype).contiguous()
        if rank != 0:
            dist.send(part, dst=0)
    elif topology.rank == 0:
        part = torch.empty(piece.shape, dtype=dtype)
        dist.recv(part, src=rank)
    return part if topology.rank == 0 else None
