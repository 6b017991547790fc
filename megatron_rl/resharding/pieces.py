"""Rectangles of Hugging Face tensors and their places in the parameters of one rank.

HF tensors are the common coordinates of everything that moves weights: loading a checkpoint
copies pieces of HF tensors into local parameters, exporting copies them back, and resharding
intersects the pieces that a Megatron rank has with the pieces that a vLLM rank needs.

Every tensor is viewed as a matrix: a vector of n elements is [n, 1], and a parameter with more than
two dimensions (vLLM's experts) is flattened to two, with its last dimension as columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape, weight_shapes
from megatron_rl.models.weights import EMBEDDING, OUTPUT_LAYER, Weight

if TYPE_CHECKING:
    from torch import Tensor


def chunk_layers(
    num_layers: int, *, chunks: int, sizes: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Return the global layers of every model chunk, in model order.

    chunks: pipeline stages, times virtual stages. sizes: the number of layers of each chunk; None
    divides evenly where possible. Otherwise chunks differ by one layer, and the smaller ones are at
    both ends, the last one first: they also compute the logits and the embedding.
    Raises ValueError if the sizes do not fit or a chunk would have no layer.
    """
    if sizes is None:
        sizes = _automatic_sizes(num_layers, chunks)
    elif len(sizes) != chunks or sum(sizes) != num_layers or min(sizes) < 1:
        raise UserError(
            f"stage_layers={list(sizes)} must list the layers of {chunks} model chunks (pipeline "
            f"stages times virtual stages), each 1 or more, with a sum of {num_layers}"
        )
    return tuple(range(*span) for span in pairwise(accumulate(sizes, initial=0)))


def _automatic_sizes(num_layers: int, chunks: int) -> list[int]:
    depth, rest = divmod(num_layers, chunks)
    if depth == 0:
        raise UserError(f"{num_layers} layers cannot be divided among {chunks} model chunks")
    sizes = [depth + (rest > 0)] * chunks
    inwards = chain.from_iterable(zip(reversed(range(chunks)), range(chunks), strict=True))
    for chunk in list(dict.fromkeys(inwards))[: -rest % chunks]:
        sizes[chunk] -= 1
    return sizes


def sharded_sizes(shape: ModelShape) -> tuple[tuple[str, int, str], ...]:
    """List what the actor's parallel sizes must divide: (kind of size, number, name)."""
    heads = [("tensor", shape.num_attention_heads, "attention heads")]
    if shape.delta:
        heads.append(("tensor", shape.delta.key_heads, "key heads of gated delta nets"))
    dense = [("tensor", shape.ffn_hidden_size, "feed-forward units")]
    if shape.experts is None:
        return (*heads, *dense)
    shared = shape.experts.shared_ffn_hidden_size
    return (
        *heads,
        *(dense if shape.layers_with("dense") else []),
        *([("tensor", shared, "units of the shared expert")] if shared else []),
        (
            ("expert tensor", 1, "expert with biases, which Megatron keeps whole,")
            if shape.traits.biases
            else ("expert tensor", shape.experts.ffn_hidden_size, "units of an expert")
        ),
        ("expert parallel", shape.experts.num_experts, "experts"),
    )


def shares_key_heads(shape: ModelShape, *, tp_size: int) -> bool:
    """Return whether tensor parallelism divides the key-value heads, or divides among them.

    With fewer heads than ranks, several ranks use the same head: vLLM copies its weights, Megatron
    gathers the activations that its shards compute.
    """
    groups = shape.num_query_groups
    return groups % tp_size == 0 or tp_size % groups == 0


def require_divisible(size: int, what: str, *, by: int, of: str) -> None:
    """Raise ValueError unless `by` divides `size`."""
    if size % by:
        raise UserError(f"{size} {what} cannot be divided by {of} {by}")


def require_fit(shape: ModelShape, *, tp_size: int, ep_size: int, expert_tp_size: int) -> None:
    """Raise ValueError unless the actor's sizes divide what they shard."""
    sizes = {"tensor": tp_size, "expert tensor": expert_tp_size, "expert parallel": ep_size}
    for kind, whole, name in sharded_sizes(shape):
        require_divisible(whole, name, by=sizes[kind], of=f"{kind} size")
    if not shares_key_heads(shape, tp_size=tp_size):
        raise UserError(
            f"{shape.num_query_groups} key-value heads neither are a multiple of nor divide "
            f"tensor size {tp_size}"
        )


# vLLM's DEFAULT_VOCAB_PADDING_SIZE. Megatron's embedding is padded to the same multiple, so that
# equal tensor parallel sizes shard the vocabulary at the same rows.
VOCABULARY_MULTIPLE = 64

Span = tuple[int, int]


class Piece(NamedTuple):
    """A rectangle of an HF tensor and its place in a local parameter."""

    tensor: str  # HF name
    rows: Span  # [start, stop) in the HF tensor
    columns: Span
    parameter: str  # name of the local parameter
    top: int = 0  # where the rectangle begins in the local parameter
    left: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the rectangle."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def crop(self, rows: Span, columns: Span) -> Piece:
        """Return the part that covers `rows` and `columns` of the HF tensor."""
        if (rows, columns) == (self.rows, self.columns):
            return self
        top, left = self.top + rows[0] - self.rows[0], self.left + columns[0] - self.columns[0]
        return Piece(self.tensor, rows, columns, self.parameter, top, left)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Return the rectangle of the full HF `tensor`, as a view [height, width]."""
        return as_matrix(tensor)[slice(*self.rows), slice(*self.columns)]

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """Return the rectangle in the local `parameter`, as a view [height, width]."""
        return self.of_matrix(Matrix(parameter))

    def of_matrix(self, matrix: Matrix) -> Tensor:
        """Return the rectangle in a local parameter, as a view [height, width]."""
        _, (first, last), (left, right), _, top, at = self
        return matrix.rectangle(last - first, right - left, top, at)


class Matrix:
    """A local parameter viewed in two dimensions, of which rectangles are taken.

    A push takes tens of thousands: each is one operation, where narrowing would be two.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._tensor = as_matrix(parameter)
        self._strides = self._tensor.stride()
        self._start = self._tensor.storage_offset()

    def rectangle(self, height: int, width: int, top: int, left: int) -> Tensor:
        """Return a view [height, width]; it must be within the matrix."""
        below, right = strides = self._strides
        start = self._start + top * below + left * right
        return self._tensor.as_strided((height, width), strides, start)


def as_matrix(tensor: Tensor) -> Tensor:
    """View `tensor` in two dimensions: [n] as [n, 1], [a, b, c] as [a * b, c]."""
    return tensor.view(-1, 1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])


def parameter_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, int]]:
    """Return the smallest matrix shape of each local parameter that contains its pieces."""
    shapes: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        height, width = shapes.get(piece.parameter, (0, 0))
        bottom, right = piece.top + piece.shape[0], piece.left + piece.shape[1]
        shapes[piece.parameter] = (max(height, bottom), max(width, right))
    return shapes


def padded_vocabulary(vocab_size: int, *, tp_size: int) -> int:
    """Return the rows of the embedding: vocabulary rounded up to a multiple of 64 and of tp."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


class _Cut(NamedTuple):
    """A piece without names: which of the weight's HF tensors, its rectangle, its first row."""

    tensor: int
    rows: Span
    columns: Span
    top: int = 0


def _named(
    cuts: Sequence[_Cut], weight: Weight, parameter: str, *, layer: int, expert: int, top: int = 0
) -> Iterator[Piece]:
    """Yield the pieces of one layer or expert; `top` is its first row where experts are stacked."""
    names = [name.format(layer=layer, expert=expert) for name in weight.hf]
    for tensor, rows, columns, row in cuts:
        yield Piece(names[tensor], rows, columns, parameter, top + row)


def _shard(total: int, rank: int, size: int) -> Span:
    return rank * total // size, (rank + 1) * total // size


def _width(size: tuple[int, ...]) -> Span:
    return (0, 1 if len(size) == 1 else size[-1])


def _simple_cuts(
    weight: Weight, *, shape: ModelShape, rank: int, size: int, padded_rows: int
) -> Iterator[_Cut]:
    """Yield the cuts of every kind but those by head; `padded_rows` is the padded vocabulary."""
    sizes = weight_shapes(weight, shape=shape)
    height, width = sizes[0][0], _width(sizes[0])
    if weight.cut == "replicated":
        top = 0
        for index, (rows, *_) in enumerate(sizes):
            yield _Cut(index, (0, rows), width, top)
            top += rows
    elif weight.cut == "rows":
        yield _Cut(0, _shard(height, rank, size), width)
    elif weight.cut == "vocabulary":
        start, stop = _shard(padded_rows, rank, size)
        if start < height:  # a shard may consist of padding only
            yield _Cut(0, (start, min(stop, height)), width)
    elif weight.cut == "columns":
        yield _Cut(0, (0, height), _shard(width[1], rank, size))
    elif weight.cut == "by_head":
        starts, top = [0] * len(sizes), 0
        for index, name in weight.parts:
            first, last = _shard(shape.sizes[name], rank, size)
            yield _Cut(index, (starts[index] + first, starts[index] + last), width, top)
            starts[index] += shape.sizes[name]
            top += last - first
    else:
        assert weight.cut == "gate_up", f"no rule for {weight.cut}"
        span = _shard(height, rank, size)
        for index in range(2):
            yield _Cut(index, span, width, index * (span[1] - span[0]))


def _interleaved(weight: Weight, *, shape: ModelShape, rank: int, size: int) -> Iterator[_Cut]:
    """Yield cuts in Megatron's order: by query group, or by key head of a gated delta net.

    The rows in this order are divided evenly; with more ranks than key heads a shard may begin
    within a group, and even within a head.
    """
    width = _width(weight_shapes(weight, shape=shape)[0])
    blocks = list(_blocks_by_head(weight, shape))
    shard = _shard(sum(height for _, _, height in blocks), rank, size)
    start = 0
    for index, row, height in blocks:
        top, bottom = max(start, shard[0]), min(start + height, shard[1])
        if top < bottom:
            first = row - start
            yield _Cut(index, (first + top, first + bottom), width, top - shard[0])
        start += height


def _blocks_by_head(weight: Weight, shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, first row, rows) of each block of consecutive rows, in Megatron's order."""
    if weight.cut == "by_head":
        assert shape.delta is not None, f"{weight.megatron} without its sizes"
        for head in range(shape.delta.key_heads):
            starts = [0] * len(weight.hf)
            for index, name in weight.parts:
                height = shape.sizes[name] // shape.delta.key_heads
                yield index, starts[index] + head * height, height
                starts[index] += shape.sizes[name]
        return
    size = shape.head_dim
    heads = shape.num_attention_heads // shape.num_query_groups
    for group in range(shape.num_query_groups):
        if weight.cut == "gated_qkv":
            own = range(group * heads, (group + 1) * heads)
            yield from ((0, 2 * head * size, size) for head in own)
            yield from ((0, (2 * head + 1) * size, size) for head in own)
        else:
            yield 0, group * heads * size, heads * size
        yield from ((index, group * size, size) for index in (1, 2))


def _concatenated_qkv(weight: Weight, *, shape: ModelShape, rank: int, size: int) -> Iterator[_Cut]:
    """Yield cuts in vLLM's order: query, key, value heads; too few key heads are repeated."""
    offset = 0
    for index, whole in enumerate(weight_shapes(weight, shape=shape)):
        dim = shape.head_dim * (2 if weight.cut == "gated_qkv" and index == 0 else 1)
        heads = whole[0] // dim
        if heads >= size:
            first, last = _shard(heads, rank, size)
        else:
            first = rank * heads // size
            last = first + 1
        rows = (first * dim, last * dim)
        yield _Cut(index, rows, _width(whole), offset)
        offset += rows[1] - rows[0]


def megatron_pieces(
    shape: ModelShape,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    layers: range | None = None,
    first_stage: bool = True,
    last_stage: bool = True,
    ep_rank: int = 0,
    ep_size: int = 1,
    expert_tp_rank: int | None = None,
    expert_tp_size: int | None = None,
    fused: bool = False,
    prefix: str = "",
) -> tuple[Piece, ...]:
    """Return the pieces that tile every parameter of one Megatron model chunk.

    layers: global layers of this chunk (all by default); local names count from 0.
    expert_tp_*: tensor parallelism of the experts, by default that of attention.
    fused: use the parameter names of Transformer Engine's layers.
    prefix: put before every parameter name (`decoder.`, a virtual stage's chunk).
    Vocabulary rows beyond the model's vocabulary are padding and have no piece. With tied
    embeddings a last stage that is not also the first has a second copy of the embedding.
    Raises ValueError if heads or feed-forward units cannot be divided.
    """
    layers = range(shape.num_layers) if layers is None else layers
    expert_rank = tp_rank if expert_tp_rank is None else expert_tp_rank
    expert_size = tp_size if expert_tp_size is None else expert_tp_size
    require_fit(shape, tp_size=tp_size, ep_size=ep_size, expert_tp_size=expert_size)
    padded_rows = padded_vocabulary(shape.vocab_size, tp_size=tp_size)
    pieces: list[Piece] = []

    def add(weight: Weight, name: str, places: Iterable[tuple[int, int, int, int]]) -> None:
        rank, size = (expert_rank, expert_size) if weight.part == "expert" else (tp_rank, tp_size)
        if weight.cut in ("qkv", "gated_qkv", "by_head"):
            cuts = list(_interleaved(weight, shape=shape, rank=rank, size=size))
        else:
            cuts = list(
                _simple_cuts(weight, shape=shape, rank=rank, size=size, padded_rows=padded_rows)
            )
        for local_layer, layer, local_expert, expert in places:
            parameter = prefix + name.format(layer=local_layer, expert=local_expert)
            pieces.extend(_named(cuts, weight, parameter, layer=layer, expert=expert))

    for weight in shape.weights:
        name = weight.fused if fused and weight.fused else weight.megatron
        if weight.part == "first" and first_stage:
            add(weight, name, [(0, 0, 0, 0)])
        elif weight.part == "first" and last_stage and shape.tied_embeddings:
            add(weight, "output_layer.weight", [(0, 0, 0, 0)])
        elif weight.part == "last" and last_stage:
            add(weight, name, [(0, 0, 0, 0)])
        elif weight.part in ("layer", "expert"):
            total = shape.experts.num_experts if weight.part == "expert" and shape.experts else 1
            local_experts = range(*_shard(total, ep_rank, ep_size)) if total > 1 else range(1)
            own = ((n - layers.start, n) for n in shape.layers_with(weight.layers, layers))
            every = itertools.product(own, enumerate(local_experts))
            add(weight, name, [(*layer, *expert) for layer, expert in every])
    return tuple(pieces)


def vllm_pieces(
    shape: ModelShape, *, tp_rank: int = 0, tp_size: int = 1, expert_parallel: bool = False
) -> tuple[Piece, ...]:
    """Return the pieces that tile every parameter of one vLLM rank, with vLLM's names.

    expert_parallel: whole experts on each rank (vLLM's `enable_expert_parallel`, in linear order)
    instead of a slice of every expert. Raises ValueError if the layout does not fit the model.
    """
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    of = "vLLM's tensor parallel size"
    if shape.delta:
        require_divisible(shape.delta.key_heads, "key heads of gated delta nets", by=tp_size, of=of)
    if shape.layers_with("dense"):
        require_divisible(shape.ffn_hidden_size, "feed-forward units", by=tp_size, of=of)
    if shape.experts and expert_parallel:
        require_divisible(shape.experts.num_experts, "experts", by=tp_size, of=of)
    elif shape.experts:
        ffn = shape.experts.ffn_hidden_size
        require_divisible(ffn, "feed-forward units of an expert", by=tp_size, of=of)
    if shape.experts and (shared := shape.experts.shared_ffn_hidden_size):
        require_divisible(shared, "units of the shared expert", by=tp_size, of=of)
    if heads % tp_size or not shares_key_heads(shape, tp_size=tp_size):
        raise UserError(
            f"{heads} attention heads and {groups} key-value heads do not fit "
            f"vLLM's tensor parallel size {tp_size}"
        )
    padded_rows = padded_vocabulary(shape.vocab_size, tp_size=tp_size)
    pieces: list[Piece] = []
    for weight in shape.weights:
        is_layer = weight.part in ("layer", "expert")
        layers = shape.layers_with(weight.layers) if is_layer else range(1)
        local_experts, rank, size = range(1), tp_rank, tp_size
        if weight.part == "expert" and shape.experts:
            local_experts = range(shape.experts.num_experts)
            if expert_parallel:
                local_experts, rank, size = (
                    range(*_shard(len(local_experts), tp_rank, tp_size)),
                    0,
                    1,
                )
        if weight.cut in ("qkv", "gated_qkv"):
            cuts = list(_concatenated_qkv(weight, shape=shape, rank=rank, size=size))
        else:
            cuts = list(
                _simple_cuts(weight, shape=shape, rank=rank, size=size, padded_rows=padded_rows)
            )
        height = sum(cut.rows[1] - cut.rows[0] for cut in cuts)
        for layer in layers:
            name = weight.vllm.format(layer=layer)
            for place, expert in enumerate(local_experts):
                top = place * height
                pieces.extend(_named(cuts, weight, name, layer=layer, expert=expert, top=top))
    return tuple(pieces)


def vllm_parameter_shapes(
    shape: ModelShape, *, tp_rank: int = 0, tp_size: int = 1, expert_parallel: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of vLLM's model on one rank, including padding.

    Derived from the pieces, with three exceptions: the vocabulary is padded, experts are stacked
    in an extra dimension, and a tied output layer is listed although it is the embedding.
    """
    pieces = vllm_pieces(shape, tp_rank=tp_rank, tp_size=tp_size, expert_parallel=expert_parallel)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (height, width) in parameter_shapes(pieces).items():
        is_vector = name.endswith(("bias", "sinks", "A_log")) or "norm" in name
        shapes[name] = (height,) if is_vector else (height, width)
        if name.endswith("conv1d.weight"):
            shapes[name] = (height, 1, width)
        if ".experts." in name:
            assert shape.experts is not None, f"{name} needs experts"
            count = shape.experts.num_experts // (tp_size if expert_parallel else 1)
            each = (height // count,) if is_vector else (height // count, width)
            shapes[name] = (count, *each)
    padded = padded_vocabulary(shape.vocab_size, tp_size=tp_size)
    for weight in shape.weights:
        if weight.cut == "vocabulary":
            shapes[weight.vllm] = (padded // tp_size, shape.hidden_size)
    if shape.tied_embeddings:  # the same memory, but vLLM loads it as a separate parameter
        shapes[OUTPUT_LAYER.vllm] = shapes[EMBEDDING.vllm]
    return shapes
