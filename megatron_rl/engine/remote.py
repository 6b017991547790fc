"""Engines on ranks of their own, as the ranks that train see them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.sections import ReshardingSection
from megatron_rl.data.token_rows import WRITER
from megatron_rl.distributed.link import Link
from megatron_rl.engine.adapters import AdapterResharder, factor_layout
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import EnginesElsewhere, Resharder, SyncStats, WeightSource
from megatron_rl.types import Prompt, Response, Rollout, SamplingSettings


def share_rollouts(rollouts: list[Rollout] | None) -> list[Rollout]:
    """Share what the first trainer has received; the other trainers get no tokens. Collective.

    Afterwards it owns all responses (`types.Response.owner`).
    """
    if dist.get_world_size() == 1:
        assert rollouts is not None
        return rollouts
    box: list[Any] = [None]
    if rollouts is not None:
        rollouts = [replace(one, response=replace(one.response, owner=WRITER)) for one in rollouts]
        box = [[replace(one, response=one.response.without_arrays()) for one in rollouts]]
    dist.broadcast_object_list(box)
    return box[0] if rollouts is None else rollouts


def build_resharder(
    receiver: EnginesElsewhere,
    settings: ReshardingSection,
    *,
    ranks_per_node: int,
    link: Link,
    adapters: bool,
) -> Resharder | AdapterResharder:
    """Build the trainers' end of weight syncs; adapters: the engines compute with adapters."""
    base = Resharder(receiver, settings, ranks_per_node, link)
    if not adapters:
        return base
    whole = EnginesElsewhere(factor_layout(receiver.layout), receiver.dtype)
    return AdapterResharder.beside(base, whole)


@dataclass
class RemoteEngine:
    """A `WeightSink` and `Responder` that sends orders to the engines of a link.

    `trainer/engine_ranks.py` executes them.
    """

    link: Link
    receiver: EnginesElsewhere
    resharder: Resharder | AdapterResharder
    shares_devices = False
    _version: int = -1

    @property
    def layout(self) -> EngineLayout:
        """The ranks of all engines."""
        return self.receiver.layout

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights."""
        return self.receiver.dtype

    @property
    def weight_version(self) -> int:
        return self._version

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings | Sequence[SamplingSettings],
    ) -> list[Response]:
        """Return responses on every trainer. Collective."""
        self.link.orders.send("responses", list(prompts), samples, sampling)
        box = [self.link.values.take()]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def sync_weights(self, actor: WeightSource, *, version: int) -> SyncStats:
        self.link.orders.send("weights", version)
        stats = self.resharder.push(actor, version=version)
        self._version = version
        return stats

    def drop_caches(self) -> None:
        self.link.orders.send("drop caches")

    def sleep(self) -> None:
        """Do nothing: the engines have devices of their own."""
