"""This process's size, rank and process group in every kind of parallelism.

A group of None is a group of one: collectives over it are no-ops through the same code path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Topology:
    """This process's rank and group in each parallelism; plain data, created once at start.

    tp: tensor, cp: context, pp: pipeline, dp: data, ep: expert parallelism. `dp_cp` spans data and
    context parallelism: the ranks that share the same parameters and sum their gradients.
    `host_group` has the ranks of `dp_cp` too; only it accepts objects and tensors on the host.
    `expert_dp` spans the ranks that share the same experts.
    """

    world_size: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: _device("cpu"))
    tp_size: int = 1
    tp_rank: int = 0
    tp_group: ProcessGroup | None = None
    cp_size: int = 1
    cp_rank: int = 0
    cp_group: ProcessGroup | None = None
    pp_size: int = 1
    pp_rank: int = 0
    pp_group: ProcessGroup | None = None
    dp_size: int = 1
    dp_rank: int = 0
    dp_group: ProcessGroup | None = None
    dp_cp_group: ProcessGroup | None = None
    host_group: ProcessGroup | None = None
    expert_dp_group: ProcessGroup | None = None
    ep_size: int = 1
    ep_rank: int = 0
    expert_tp_size: int | None = None  # tensor parallelism of the experts; None: tp_size
    virtual_stages: int = 1  # model chunks per pipeline rank
    stage_layers: tuple[int, ...] | None = None  # layers of each model chunk; None: automatic

    def __post_init__(self) -> None:
        product = self.tp_size * self.pp_size * self.cp_size * self.dp_size
        if product != self.world_size:
            raise UserError(
                f"tp {self.tp_size} * pp {self.pp_size} * cp {self.cp_size} * dp {self.dp_size} "
                f"= {product}, but there are {self.world_size} processes; choose a layout whose "
                "product is the number of processes"
            )

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> Topology:
        """Return the topology of one process without torch.distributed."""
        return cls(device=_device(device))

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the output layer and computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def round_size(self) -> int:
        """Required multiple of the number of micro-batches; pp_size if stages are interleaved."""
        return self.pp_size if self.virtual_stages > 1 else 1

    @property
    def alignment(self) -> int:
        """Multiple to which every sequence is padded: 2 * cp chunks, each split over tp."""
        return 2 * self.cp_size * self.tp_size


def _device(name: str | torch.device) -> torch.device:
    import torch  # deferred: computing with the sizes of a layout must not import torch

    return torch.device(name)
