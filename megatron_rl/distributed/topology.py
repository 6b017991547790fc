"""Which place this process has in every kind of parallelism.

The triple of one parallelism is size, rank and process group. A group of None stands for a group
of one: collectives over it are no-ops through the same code path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Topology:
    """This process's rank and group in each parallelism; plain data, made once at start.

    tp tensor, cp context, pp pipeline, dp data, ep expert parallel. `dp_cp` spans data and context
    parallelism: the ranks that hold the same parameters and sum their gradients.
    """

    world_size: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
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
    ep_size: int = 1
    ep_rank: int = 0
    virtual_stages: int = 1  # model chunks per pipeline rank

    def __post_init__(self) -> None:
        product = self.tp_size * self.pp_size * self.cp_size * self.dp_size
        if product != self.world_size:
            raise ValueError(
                f"tp {self.tp_size} * pp {self.pp_size} * cp {self.cp_size} * dp {self.dp_size} "
                f"= {product}, but there are {self.world_size} processes; choose a layout whose "
                "product is the number of processes"
            )

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> Topology:
        """One process without torch.distributed."""
        return cls(device=torch.device(device))

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer and computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def round_size(self) -> int:
        """Micro-batches come in multiples of this: one per stage where stages interleave."""
        return self.pp_size if self.virtual_stages > 1 else 1

    def alignment(self, *, sequence_parallel: bool) -> int:
        """Multiple to which every sequence is padded: 2 cp chunks, cut once more over tp."""
        return 2 * self.cp_size * (self.tp_size if sequence_parallel else 1)
