"""Layouts of actor and engines: the pieces of each rank, as plain arithmetic.

No process group is needed, so plans can be computed and tested for any cluster.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape, tensor_shapes
from megatron_rl.resharding.pieces import (
    Piece,
    Span,
    chunk_layers,
    megatron_pieces,
    vllm_parameter_shapes,
    vllm_pieces,
)


@dataclass(frozen=True)
class ActorLayout:
    """Sizes of the actor's parallelisms; ranks are numbered in Megatron's order tp-cp-ep-dp-pp.

    `virtual` is the number of model chunks per pipeline stage. Experts are sharded over `expert`
    ranks and, within each expert, over `expert_tensor` ranks (None: equal to `tensor`).
    `stage_layers` has the number of layers of every model chunk (None: `pieces.chunk_layers`
    chooses them).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    stage_layers: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def depth(self, shape: ModelShape, *, stage: int) -> int:
        """Return the number of layers of a pipeline stage."""
        return sum(map(len, self.layers(shape, stage=stage)))

    def layers(self, shape: ModelShape, *, stage: int) -> tuple[range, ...]:
        """Return the global layers of a pipeline stage, by model chunk."""
        return self.chunks(shape)[stage :: self.pipeline]

    def shard_coordinates(self, rank: int) -> tuple[int, ...]:
        """Return `rank`'s coordinates in the sharding; equal coordinates mean equal shards."""
        pp_rank, in_stage = divmod(rank, self.world_size // self.pipeline)
        expert_tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        ep_rank, in_expert = in_stage // expert_tensor % self.expert, in_stage % expert_tensor
        return pp_rank, in_stage % self.tensor, ep_rank, in_expert

    def __str__(self) -> str:
        names = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "dp": self.data}
        names |= {"vpp": self.virtual, "ep": self.expert}
        parts = [f"{key}{size}" for key, size in names.items() if size > 1 or key == "tp"]
        if self.expert_tensor not in (None, self.tensor):
            parts.append(f"etp{self.expert_tensor}")
        return " ".join(["actor", *parts])

    def chunks(self, shape: ModelShape) -> tuple[range, ...]:
        """Return the global layers of every model chunk, in model order."""
        count = self.pipeline * self.virtual
        return chunk_layers(shape.num_layers, chunks=count, sizes=self.stage_layers)

    def pieces(self, shape: ModelShape, *, rank: int, fused: bool = False) -> tuple[Piece, ...]:
        """Return the pieces on `rank`; with virtual stages names start with `chunk{i}.`."""
        stage_size = self.world_size // self.pipeline
        expert_tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        if stage_size % (expert_tensor * self.expert):
            raise UserError(
                f"expert tensor size {expert_tensor} x expert size {self.expert} does not divide "
                f"the {stage_size} ranks of a pipeline stage"
            )
        pp_rank, tp_rank, ep_rank, expert_tp_rank = self.shard_coordinates(rank)
        chunks = self.chunks(shape)
        pieces: list[Piece] = []
        for virtual_rank in range(self.virtual):
            chunk = virtual_rank * self.pipeline + pp_rank
            pieces += megatron_pieces(
                shape,
                tp_rank=tp_rank,
                tp_size=self.tensor,
                layers=chunks[chunk],
                first_stage=chunk == 0,
                last_stage=chunk == len(chunks) - 1,
                ep_rank=ep_rank,
                ep_size=self.expert,
                expert_tp_rank=expert_tp_rank,
                expert_tp_size=expert_tensor,
                fused=fused,
                prefix=f"chunk{virtual_rank}." if self.virtual > 1 else "",
            )
        return tuple(pieces)


class PushTarget(Protocol):
    """Target of a push: the parts of HF tensors that each rank needs, and their names.

    Its ranks are the actor's ranks, or follow them.
    """

    @property
    def first(self) -> int:
        """The first rank that needs weights."""
        ...

    @property
    def ranks(self) -> range:
        """All ranks that need weights."""
        ...

    def shard_coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank's parts: equal coordinates, equal parts."""
        ...

    def pieces(self, shape: ModelShape, *, rank: int) -> tuple[Piece, ...]:
        """Return the parts that a rank needs, each with its place in a parameter of the target."""
        ...


@dataclass(frozen=True)
class EngineLayout(PushTarget):
    """vLLM engines of `tensor` adjacent ranks each, which together use `world_size` ranks.

    expert_parallel: whole experts on each rank instead of a slice of every expert. first: rank of
    the first engine's first rank; the ranks before it are those of the actor, which only train.
    """

    tensor: int
    world_size: int
    expert_parallel: bool = False
    first: int = 0

    @property
    def ranks(self) -> range:
        """All ranks of all engines."""
        return range(self.first, self.first + self.world_size)

    def shard_coordinates(self, rank: int) -> tuple[int, ...]:
        """Return `rank`'s coordinates in its engine; equal coordinates mean equal shards."""
        return ((rank - self.first) % self.tensor,)

    def __str__(self) -> str:
        experts = " expert parallel" if self.expert_parallel else ""
        return f"vLLM tp{self.tensor}{experts} x {self.world_size // self.tensor} engines"

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError if the engines do not use all ranks or cannot shard the model."""
        self.pieces(shape, rank=self.first)

    def parameter_shapes(self, shape: ModelShape, *, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape in which vLLM loads each parameter of its model on `rank`."""
        return vllm_parameter_shapes(
            shape,
            tp_rank=(rank - self.first) % self.tensor,
            tp_size=self.tensor,
            expert_parallel=self.expert_parallel,
        )

    def pieces(self, shape: ModelShape, *, rank: int) -> tuple[Piece, ...]:
        """Return the pieces that `rank` needs, with vLLM's parameter names."""
        if self.world_size % self.tensor:
            raise UserError(
                f"vLLM's tensor parallel size {self.tensor} does not divide {self.world_size} ranks"
            )
        if self.expert_parallel and shape.experts is None:
            raise UserError("an expert parallel engine needs a model with experts")
        heads = shape.num_query_groups
        if self.tensor > heads and not shape.traits.engine_shares_key_heads:
            raise UserError(
                f"vLLM does not copy the {heads} key-value heads of {shape.architecture} to "
                f"{self.tensor} ranks; at most {heads} ranks can form an engine"
            )
        return vllm_pieces(
            shape,
            tp_rank=(rank - self.first) % self.tensor,
            tp_size=self.tensor,
            expert_parallel=self.expert_parallel,
        )


Rectangle = tuple[Span, Span]
Owned = dict[str, dict[Rectangle, dict[int, Piece]]]  # by tensor, rectangle, group
Needs = dict[str, dict[Piece, list[int]]]  # groups by tensor and piece


def find_owners(shape: ModelShape, layout: ActorLayout, *, fused: bool) -> Owned:
    """Find, per HF tensor, each distinct rectangle and the groups of ranks that own it."""
    owned: Owned = {}
    for group, ranks in enumerate(group_equal_ranks(layout)):
        for piece in layout.pieces(shape, rank=ranks[0], fused=fused):
            rectangles = owned.setdefault(piece.tensor, {})
            rectangles.setdefault((piece.rows, piece.columns), {}).setdefault(group, piece)
    return owned


def find_needs(shape: ModelShape, layout: PushTarget) -> Needs:
    """Find, per HF tensor in model order, each piece and the groups of ranks that need it."""
    needs: Needs = {name: {} for name in tensor_shapes(shape)}
    for group, ranks in enumerate(group_equal_ranks(layout)):
        for piece in layout.pieces(shape, rank=ranks[0]):
            needs[piece.tensor].setdefault(piece, []).append(group)
    return needs


def largest_module(shape: ModelShape, layout: EngineLayout, *, rank: int = 0) -> int:
    """Count the elements of the largest module of a layer, as an engine's loaders keep it whole."""
    sizes, modules = tensor_shapes(shape), dict[str, set[str]]()
    for piece in layout.pieces(shape, rank=rank):
        modules.setdefault(piece.parameter.rpartition(".")[0], set()).add(piece.tensor)
    return max(
        sum(math.prod(sizes[name]) for name in names)
        for module, names in modules.items()
        if ".layers." in module
    )


def group_equal_ranks(layout: ActorLayout | PushTarget) -> list[list[int]]:
    """Group the ranks that have, or need, equal shards."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.ranks:
        groups.setdefault(layout.shard_coordinates(rank), []).append(rank)
    return list(groups.values())


def layout_of(topology: Topology) -> ActorLayout:
    """Return the actor layout of a topology."""
    return ActorLayout(
        tensor=topology.tp_size,
        pipeline=topology.pp_size,
        context=topology.cp_size,
        data=topology.dp_size,
        virtual=topology.virtual_stages,
        expert=topology.ep_size,
        expert_tensor=topology.expert_tp_size,
        stage_layers=topology.stage_layers,
    )


def has_fused_names(parameters: Iterable[str]) -> bool:
    """Return whether parameters have the names of Transformer Engine's layers."""
    return any(name.endswith("layer_norm_weight") for name in parameters)
