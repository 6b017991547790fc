"""Which rank sends which slice to whom: only what the destination does not hold already.

Pure arithmetic on pieces, computed once per run. For every rectangle that a vLLM rank needs the
source is the nearest rank that holds it: itself (nothing moves), else one of the same node, else
any; among equals the one that has least to send so far. The bytes on the wire are therefore
exactly the lower bound of point-to-point transfer: what each rank needs and does not hold.
`rounds.py` cuts the plan into exchanges of bounded size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import Piece, Span


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle of an HF tensor on its way between two ranks (or within one)."""

    source: int
    destination: int
    held: Piece  # the rectangle in the source rank's Megatron parameter
    needed: Piece  # the same rectangle in the destination rank's vLLM parameter

    @property
    def tensor(self) -> str:
        """HF name."""
        return self.held.tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.held.size


def _intersection(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def crop(piece: Piece, rows: Span, columns: Span) -> Piece:
    """The part of `piece` that covers `rows` and `columns` of the HF tensor."""
    return Piece(
        tensor=piece.tensor,
        rows=rows,
        columns=columns,
        parameter=piece.parameter,
        row=piece.row + rows[0] - piece.rows[0],
        column=piece.column + columns[0] - piece.columns[0],
    )


Holders = dict[tuple[Span, Span], list[tuple[int, Piece]]]


def _index_sources(shape: ModelShape, layout: ActorLayout, *, fused: bool) -> dict[str, Holders]:
    """Per HF tensor: each distinct rectangle with the ranks that hold it."""
    index: dict[str, Holders] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(shape, rank=rank, fused=fused):
            holders = index.setdefault(piece.tensor, {})
            holders.setdefault((piece.rows, piece.columns), []).append((rank, piece))
    return index


def _transfer_order(
    index: dict[str, Holders], needs: dict[str, list[tuple[int, Piece]]], stage_size: int
) -> list[str]:
    """Tensors module by module, taken from all pipeline stages in turn so that all send.

    Modules are the engine's, in the order of the model: vLLM's loaders keep what they are given
    until all of a module is there, so one module at a time is under way.
    """
    modules: dict[str, list[str]] = {}
    for name, pieces in needs.items():
        modules.setdefault(pieces[0][1].parameter.rpartition(".")[0], []).append(name)
    by_stage: dict[int, list[list[str]]] = {}
    for names in modules.values():
        first_rank = min(rank for held in index[names[0]].values() for rank, _ in held)
        by_stage.setdefault(first_rank // stage_size, []).append(names)
    placed = [
        (place / len(queue), stage, names)
        for stage, queue in by_stage.items()
        for place, names in enumerate(queue)
    ]
    return [name for _, _, names in sorted(placed, key=lambda item: item[:2]) for name in names]


def iterate_copies(
    shape: ModelShape,
    source: ActorLayout,
    destination: EngineLayout,
    *,
    fused: bool = False,
    ranks_per_node: int | None = None,
) -> Iterator[Copy]:
    """Every copy of the plan, in transfer order; the same sequence on every rank.

    ranks_per_node: ranks are numbered node by node (None: all on one node).
    """
    if source.world_size != destination.world_size:
        raise ValueError(f"{source} and {destination} have different numbers of ranks")
    node_size = ranks_per_node or source.world_size
    index = _index_sources(shape, source, fused=fused)
    needs: dict[str, list[tuple[int, Piece]]] = {name: [] for name in tensor_shapes(shape)}
    for rank in range(destination.world_size):
        for piece in destination.pieces(shape, rank=rank):
            needs[piece.tensor].append((rank, piece))
    sent = [0] * source.world_size

    def distance(rank: int, to: int) -> tuple[int, int, int]:
        return (
            0 if rank == to else 1 if rank // node_size == to // node_size else 2,
            sent[rank],
            rank,
        )

    for name in _transfer_order(index, needs, source.world_size // source.pipeline):
        for to, needed in needs[name]:
            for (held_rows, held_columns), holders in index[name].items():
                rows = _intersection(held_rows, needed.rows)
                columns = _intersection(held_columns, needed.columns)
                if rows is None or columns is None:
                    continue
                rank, held = min(holders, key=lambda holder: distance(holder[0], to))
                copy = Copy(rank, to, crop(held, rows, columns), crop(needed, rows, columns))
                if rank != to:
                    sent[rank] += copy.size
                yield copy
