"""Export of the policy as Hugging Face safetensors, under any layout, by several writers.

The tensors are divided into files in the model's order. A file is written by one rank, and as many
files as there are writers are written at a time. Writers receive the rectangles of their tensors
from ranks that have them in buckets of bytes. Every rank goes through the same steps, and in a step
each writer receives one bucket.

`export_checkpoint` exports a distributed checkpoint. Each rank exports its own shards; its memory
is limited to these, one full tensor and, on rank 0, one file of the export.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.actor.build import build_chunks
from megatron_rl.actor.checkpoint import load_checkpoint
from megatron_rl.actor.checkpoint_contents import read_state
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.critic import ValueModel
from megatron_rl.actor.lora import adapted_weights, add_adapters, describe_adapters
from megatron_rl.actor.model import PolicyModel
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.weights import (
    HfReader,
    ProgressCallback,
    ignore_progress,
    load_model,
    named_parameters,
    stored_dtypes,
)
from megatron_rl.config.sections import LoraSection
from megatron_rl.distributed.agreement import (
    StragglerBarrier,
    raise_across_ranks,
    run_on_rank_0,
    wire_device,
)
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.safetensors_headers import GGUF_ORIGIN, INDEX, SINGLE
from megatron_rl.models.shape import ModelShape, read_critic_shape, tensor_shapes, text_model
from megatron_rl.models.stored_tensors import (
    further_tensors,
    stored_places,
    stored_shapes,
    view_stored,
)
from megatron_rl.resharding.adapted import LocalWeight, read_rectangle
from megatron_rl.resharding.layouts import has_fused_names, layout_of
from megatron_rl.resharding.pieces import Piece

SHARD_BYTES = 4 << 30  # of a file, in the memory of its writer
BUCKET_BYTES = 128 << 20  # sent at once; a writer receives one at a time
MAX_WRITERS = 16
PATIENCE = 1800.0  # seconds without progress on any rank
APPEARS_SECONDS = 30.0  # for a file of another node to be seen
_ALIGNMENT = 8  # bytes: a bucket may contain several dtypes
_FURTHER_TOKENS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
)  # keys of config.json
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


@dataclass(frozen=True)
class _Bucket:
    """Rectangles of one file's tensors that travel together from one rank to the writer."""

    owner: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class _File:
    """A file of the export, its writer and what the writer receives, in order."""

    name: str
    writer: int
    tensors: tuple[str, ...]
    buckets: tuple[_Bucket, ...]


class ExportPlan:
    """Who sends and writes what; computed alike on every rank.

    shape, dtypes: of every tensor of the model. fused: whether the parameters have the names of
    Transformer Engine's layers. further: sizes of tensors that writers copy from the source folder.
    """

    def __init__(
        self,
        shape: ModelShape,
        topology: Topology,
        *,
        dtypes: Mapping[str, torch.dtype],
        fused: bool,
        further: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.further = further or {}
        self.shape, self.sizes, self.dtypes = (
            shape,
            {**stored_shapes(shape), **self.further},
            dtypes,
        )
        self._parts: dict[str, list[str]] = {name: [] for name in self.further}
        for name, place in stored_places(shape).items():
            self._parts.setdefault(place.tensor, []).append(name)
        owners = find_owners(shape, topology, fused=fused)
        contents = list(self._split())
        writers = min(len(contents), MAX_WRITERS, topology.world_size)
        names = [SINGLE]
        if len(contents) > 1:
            count = f"{len(contents):05d}"
            names = [f"model-{n:05d}-of-{count}.safetensors" for n in range(1, len(contents) + 1)]
        self.files = [
            # Writers are spread over the ranks, and so over the nodes.
            _File(
                name,
                index % writers * topology.world_size // writers,
                tuple(tensors),
                tuple(self._buckets(tensors, owners)),
            )
            for index, (name, tensors) in enumerate(zip(names, contents, strict=True))
        ]
        self.waves = [
            self.files[start : start + writers] for start in range(0, len(self.files), writers)
        ]
        self.steps = sum(max(len(file.buckets) for file in wave) for wave in self.waves)

    def _bytes(self, tensor: str) -> int:
        return torch.Size(self.sizes[tensor]).numel() * self.dtypes[tensor].itemsize

    def _split(self) -> Iterator[list[str]]:
        """Divide the tensors into files of at most SHARD_BYTES, or one tensor."""
        pending: list[str] = []
        total = 0
        for name in self.sizes:
            size = self._bytes(name)
            if pending and total + size > SHARD_BYTES:
                yield pending
                pending, total = [], 0
            pending.append(name)
            total += size
        yield pending

    def _buckets(
        self, tensors: Sequence[str], owners: Mapping[str, Sequence[tuple[int, Piece]]]
    ) -> Iterator[_Bucket]:
        """Combine the rectangles that one rank has of a file's tensors up to BUCKET_BYTES."""
        by_owner: dict[int, list[Piece]] = {}
        for name in (part for tensor in tensors for part in self._parts.get(tensor, [tensor])):
            for rank, piece in owners[name]:
                by_owner.setdefault(rank, []).extend(self._rows(piece))
        for rank, pieces in by_owner.items():
            pending: list[Piece] = []
            total = 0
            for piece in pieces:
                size = self.bytes_of(piece)
                if pending and total + size > BUCKET_BYTES:
                    yield _Bucket(rank, tuple(pending))
                    pending, total = [], 0
                pending.append(piece)
                total += size
            yield _Bucket(rank, tuple(pending))

    def _rows(self, piece: Piece) -> Iterator[Piece]:
        """Cut a rectangle into rows that fit a bucket."""
        start, stop = piece.rows
        row = piece.shape[1] * self.dtypes[piece.tensor].itemsize
        step = max(1, BUCKET_BYTES // row)
        for first in range(start, stop, step):
            yield piece.crop((first, min(first + step, stop)), piece.columns)

    def bytes_of(self, piece: Piece) -> int:
        """Return the bytes of a rectangle in a bucket."""
        size = piece.size * self.dtypes[piece.tensor].itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def index(self) -> str:
        """Return the text of the index, which maps each tensor to its file."""
        weight_map = {name: file.name for file in self.files for name in file.tensors}
        total = sum(self._bytes(name) for name in self.sizes)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def find_owners(
    shape: ModelShape, topology: Topology, *, fused: bool
) -> dict[str, list[tuple[int, Piece]]]:
    """Map every HF tensor to rectangles that tile it, each with the first rank that has it."""
    layout = layout_of(topology)
    first: dict[tuple[int, ...], int] = {}  # of the ranks with equal shards
    for rank in range(topology.world_size):
        first.setdefault(layout.shard_coordinates(rank), rank)
    owners: dict[str, dict[tuple, tuple[int, Piece]]] = {name: {} for name in tensor_shapes(shape)}
    for rank in first.values():
        for piece in layout.pieces(shape, rank=rank, fused=fused):
            owners[piece.tensor].setdefault((piece.rows, piece.columns), (rank, piece))
    return {name: list(tiles.values()) for name, tiles in owners.items()}


@torch.no_grad()
def export_weights(
    parameters: Mapping[str, LocalWeight],
    *,
    shape: ModelShape,
    topology: Topology,
    source: str | Path,
    folder: str | Path,
    progress: ProgressCallback = ignore_progress,
) -> None:
    """Write a Hugging Face folder; config and tokenizer files are copied from `source`.

    Collective over all ranks; the folder must be on a file system that they share. Every tensor
    keeps its dtype in `source`. What `source` has besides a wrapped text model is copied. The
    folder appears under its final name only when complete.
    progress: called with the numbers of finished and total steps, also while this rank waits for
        ranks that make progress. Raises an error of any rank on all of them.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    dtypes = stored_dtypes(source, shape)
    reader, further = HfReader(source), dict(further_tensors(source, shape))
    dtypes |= {name: reader.dtype(name) for name in further}
    fused = has_fused_names(parameters)
    plan = ExportPlan(shape, topology, dtypes=dtypes, fused=fused, further=further)

    def begin() -> str:
        begin_folder(partial, source)
        if shape.head == "value":
            name_value_head(partial / "config.json")
        return secrets.token_hex(6)

    token = run_on_rank_0(begin, doing=f"creating {partial}")
    barrier = StragglerBarrier(f"exporting the model {token}", patience=PATIENCE)
    barrier.begin()
    report = barrier.with_progress(progress)
    error = _run(plan, parameters, reader, partial=partial, rank=topology.rank, progress=report)
    barrier.finish(while_waiting=lambda: progress(plan.steps, plan.steps))
    raise_across_ranks(error, doing=f"writing {folder}")
    run_on_rank_0(lambda: _complete(plan, partial, folder), doing=f"completing {folder}")


def _run(
    plan: ExportPlan,
    parameters: Mapping[str, LocalWeight],
    reader: HfReader,
    *,
    partial: Path,
    rank: int,
    progress: ProgressCallback,
) -> Exception | None:
    """Go through all steps; return this rank's error, after which it only receives."""
    error: Exception | None = None
    done = 0
    for wave in plan.waves:
        own = next((file for file in wave if file.writer == rank), None)
        tensors: dict[str, Tensor] = {}
        for name in own.tensors if own is not None else ():
            tensors[name] = (
                reader.slice(name)[:]
                if name in plan.further
                else torch.empty(plan.sizes[name], dtype=plan.dtypes[name])
            )
        for step in range(max(len(file.buckets) for file in wave)):
            buckets = [
                (file.writer, file.buckets[step]) for file in wave if step < len(file.buckets)
            ]
            received = _exchange(plan, buckets, parameters, rank=rank)
            for bucket, values in received:
                _place(plan, bucket, values, tensors)
            done += 1
            progress(done, plan.steps)
        if own is not None and error is None:
            try:
                partial.mkdir(parents=True, exist_ok=True)  # another node may not see it yet
                save_file(tensors, partial / own.name, metadata={"format": "pt"})
            except Exception as caught:  # noqa: BLE001 - raised on all ranks after the last step
                error = caught
            progress(done, plan.steps)
    return error


def _exchange(
    plan: ExportPlan,
    buckets: Sequence[tuple[int, _Bucket]],
    parameters: Mapping[str, LocalWeight],
    *,
    rank: int,
) -> list[tuple[_Bucket, Tensor]]:
    """Send this rank's buckets of one step to their writers; return the one that it receives."""
    works: list[dist.Work | None] = []
    received: list[tuple[_Bucket, Tensor]] = []
    sent: list[Tensor] = []
    for writer, bucket in buckets:
        if bucket.owner == rank:
            values = _pack(plan, bucket, parameters)
            if writer == rank:
                received.append((bucket, values))
            else:
                sent.append(values)  # kept until it is sent
                works.append(dist.isend(values, dst=writer))
        elif writer == rank:
            size = sum(plan.bytes_of(piece) for piece in bucket.pieces)
            values = torch.empty(size, dtype=torch.uint8, device=wire_device())
            received.append((bucket, values))
            works.append(dist.irecv(values, src=bucket.owner))
    for work in works:
        assert work is not None, "every rank is in the group of all ranks"
        work.wait()
    return received


def _pack(plan: ExportPlan, bucket: _Bucket, parameters: Mapping[str, LocalWeight]) -> Tensor:
    """Return the bytes of a bucket's rectangles in the dtypes of the export."""
    parts = []
    for piece in bucket.pieces:
        values = read_rectangle(parameters[piece.parameter], piece).to(plan.dtypes[piece.tensor])
        flat = values.contiguous().view(-1).view(torch.uint8)
        parts.append(F.pad(flat, (0, -len(flat) % _ALIGNMENT)))
    return torch.cat(parts).to(wire_device())


def _place(
    plan: ExportPlan, bucket: _Bucket, values: Tensor, tensors: Mapping[str, Tensor]
) -> None:
    """Copy the rectangles of a bucket into the tensors of its file."""
    values, start = values.cpu(), 0
    tensors = view_stored(tensors, plan.shape)
    for piece in bucket.pieces:
        dtype = plan.dtypes[piece.tensor]
        part = values[start : start + piece.size * dtype.itemsize].view(dtype)
        piece.of_tensor(tensors[piece.tensor]).copy_(part.view(piece.shape))
        start += plan.bytes_of(piece)


def _complete(plan: ExportPlan, partial: Path, folder: Path) -> None:
    """Write the index if there are several files, and give the folder its name."""
    deadline = time.monotonic() + APPEARS_SECONDS
    while missing := [file.name for file in plan.files if not (partial / file.name).is_file()]:
        if time.monotonic() > deadline:
            raise UserError(
                f"{partial} lacks {len(missing)} files of other ranks, first {missing[0]}; write "
                "to a file system that all nodes share"
            )
        time.sleep(0.1)
    if len(plan.files) > 1:
        (partial / INDEX).write_text(plan.index(), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


_TEMPLATES = "additional_chat_templates"  # a folder of further chat templates


def begin_folder(partial: Path, source: str | Path) -> None:
    """Create a new folder with copies of all files of `source` except weights, and its templates.

    Layers that predict further tokens (MTP) are not loaded, so the config.json of a text model then
    lists none; of a wrapped one they are copied. It names its class, which some programs need.
    """
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith((*_WEIGHT_SUFFIXES, GGUF_ORIGIN)):
            shutil.copy2(path, partial / path.name)
        elif path.name == _TEMPLATES and path.is_dir():
            shutil.copytree(path, partial / path.name)
    path = partial / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = text_model(config)[0] if config and not config.get("architectures") else config
    without = {key: 0 for key in _FURTHER_TOKENS if config.get(key)}
    if named | without != config:
        path.write_text(json.dumps(named | without, indent=2) + "\n", encoding="utf-8")


def name_value_head(file: Path) -> None:
    """Name transformers' class with one value in a critic's config.json, unless it is wrapped.

    For classification of sequences, whose layer `score` has no bias; its logit is the last token's.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    names = [_CAUSAL.sub("ForSequenceClassification", name) for name in config["architectures"]]
    labels: dict[str, object] = {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
    text = json.dumps(config | labels | {"architectures": names}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


_CAUSAL = re.compile(r"ForCausalLM$")


def export_checkpoint(
    checkpoint: str | Path,
    target: str | Path,
    *,
    like: str | Path,
    shape: ModelShape,
    topology: Topology,
    progress: ProgressCallback,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder. Collective.

    like: the model folder that provides config, tokenizer files and each tensor's dtype, and for a
    checkpoint of adapters the weights that these are added to. shape: of the tensors to write; with
    a value head the checkpoint is of a critic.
    """
    stored = read_state(checkpoint).get("adapters")
    weights: Mapping[str, LocalWeight]
    with megatron_runtime():
        chunks = _build(shape, stored_dtypes(like, shape), topology)
        if stored is None:
            load_checkpoint(checkpoint, chunks=chunks, topology=topology)
            weights = named_parameters(chunks)
        else:
            start = read_critic_shape(like) if shape.head == "value" else shape
            load_model(chunks, shape=start, topology=topology, folder=like)
            lora = LoraSection(**{key: stored[key] for key in ("rank", "alpha", "targets")})
            seed = stored["seed"]
            add_adapters(chunks, lora, seed=seed, shape=shape, topology=topology)
            adapters = describe_adapters(lora, seed=seed, folder=like)
            updates = load_checkpoint(
                checkpoint, chunks=chunks, topology=topology, adapters=adapters
            )
            weights = adapted_weights(chunks, lora, seed=seed, updates=updates)
    export_weights(
        weights,
        shape=shape,
        topology=topology,
        source=like,
        folder=target,
        progress=progress,
    )


def _build(
    shape: ModelShape, dtypes: dict[str, torch.dtype], topology: Topology
) -> list[PolicyModel]:
    """Build chunks in the dtype that represents every tensor exactly."""
    dtype = torch.bfloat16 if set(dtypes.values()) == {torch.bfloat16} else torch.float32
    model = ValueModel if shape.head == "value" else PolicyModel
    return build_chunks(shape, settings=ActorSettings(dtype=dtype), topology=topology, model=model)
