"""Where weights come from: the local parameters of an actor rank, and what moving them cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.resharding.layouts import ActorLayout
from megatron_rl.resharding.pieces import Piece


class WeightHolder(Protocol):
    """Anything that holds Megatron shards of a model: the actor, or shards cut by a test."""

    @property
    def shape(self) -> ModelShape:
        """The whole model's shape."""
        ...

    @property
    def topology(self) -> Topology:
        """This rank's place."""
        ...

    def named_parameters_local(self) -> Mapping[str, Tensor]:
        """This rank's parameters by their local names."""
        ...


def layout_of(topology: Topology) -> ActorLayout:
    """The actor layout that a rank's topology belongs to."""
    return ActorLayout(
        tensor=topology.tp_size,
        pipeline=topology.pp_size,
        context=topology.cp_size,
        data=topology.dp_size,
        virtual=topology.virtual_stages,
        expert=topology.ep_size,
    )


def has_fused_names(parameters: Mapping[str, Tensor]) -> bool:
    """Whether parameters carry the names of Transformer Engine's layers."""
    return any(name.endswith("layer_norm_weight") for name in parameters)


def parameter_shapes(pieces: tuple[Piece, ...]) -> dict[str, tuple[int, int]]:
    """Smallest matrix shape of each local parameter that its pieces fit in."""
    shapes: dict[str, tuple[int, int]] = {}
    for piece in pieces:
        height, width = shapes.get(piece.parameter, (0, 0))
        bottom, right = piece.row + piece.shape[0], piece.column + piece.shape[1]
        shapes[piece.parameter] = (max(height, bottom), max(width, right))
    return shapes


def check_parameters(
    parameters: Mapping[str, Tensor], pieces: tuple[Piece, ...], *, layout: ActorLayout
) -> None:
    """Raise ValueError naming every local parameter that is missing, extra or of a wrong shape.

    Rows beyond the pieces are allowed: they pad the vocabulary.
    """
    shapes = parameter_shapes(pieces)
    problems = [f"{name} is missing" for name in shapes.keys() - parameters.keys()]
    for name, parameter in parameters.items():
        height, width = parameter.shape[0], parameter[0].numel() if parameter.dim() > 1 else 1
        padded = "word_embeddings" in name or "output_layer" in name
        if name not in shapes:
            if not padded:  # a shard of the vocabulary may be padding altogether
                problems.append(f"{name} {tuple(parameter.shape)} is unknown to the table")
        elif width != shapes[name][1] or not (
            height == shapes[name][0] or (padded and height > shapes[name][0])
        ):
            problems.append(
                f"{name} has shape {tuple(parameter.shape)}, the table says {shapes[name]}"
            )
    if problems:
        raise ValueError(f"parameters of {layout}: " + "; ".join(sorted(problems)))


@dataclass(frozen=True)
class SyncStats:
    """What one weight push cost: seconds on this rank, bytes summed over all ranks."""

    seconds: float
    bytes_sent: int  # between processes
    bytes_local: int  # copied within a process
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    repairs: int = 0  # pushes of this run that had to be repeated by gathering

    def to_metrics(self) -> dict[str, float]:
        """Metrics of a training step, by their names in metrics.jsonl."""
        rate = self.bytes_sent / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return {
            "sync/seconds": self.seconds,
            "sync/bytes_sent": float(self.bytes_sent),
            "sync/bytes_local": float(self.bytes_local),
            "sync/gigabytes_per_second": rate,
            "sync/repairs": float(self.repairs),
            **{f"sync/{phase}_seconds": seconds for phase, seconds in self.phases.items()},
        }
