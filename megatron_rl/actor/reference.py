"""The reference policy of a KL term: frozen weights kept on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.lora import without_adapters
from megatron_rl.actor.memory import PinnedMemory
from megatron_rl.actor.weights import load_model, named_parameters
from megatron_rl.types import TokenBatch

PIECE = 64 << 20  # bytes of a parameter that are exchanged at once


class ReferencePolicy:
    """Weights of another model folder, sharded like the actor's and swapped in for scoring.

    Parameters are swapped with the actor's piece by piece: this needs device memory for only two
    pieces, and the reference uses the policy's layouts, kernels and packs.

    A folder that the actor has read, and not changed since, is not read again. An actor with
    adapters never changes the model's weights: its own folder needs no copies, and adapters are off
    while the reference is computed.

    Raises ValueError naming the tensors that the folder lacks or has in another shape.
    """

    def __init__(self, actor: MegatronActor, folder: str | Path) -> None:
        self.actor = actor
        is_own = Path(folder).resolve() == actor.model_folder.resolve()
        self.inactive: dict[str, Tensor] = {}
        if actor.settings.lora and is_own:
            return
        named, on_cuda = self._parameters(), actor.topology.device.type == "cuda"
        tensors = list(named.values())
        copies = PinnedMemory().copies_of(tensors) if on_cuda else [t.clone() for t in tensors]
        self.inactive = dict(zip(named, copies, strict=True))
        if actor.is_initial and is_own:
            if on_cuda:
                torch.cuda.synchronize()  # before others read the copies or change the weights
            return  # the copies are this folder's weights
        try:
            with megatron_runtime():
                load_model(actor.chunks, shape=actor.shape, topology=actor.topology, folder=folder)
        finally:
            self._exchange()  # restore the policy's weights

    def compute_logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Compute log-probs of the labels, [T] per pack, 0 off the mask."""
        with self._active():
            return self.actor.compute_logprobs(micro_batches, routing="own")

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute log-probs and this policy's entropies (nats) of each pack."""
        with self._active():
            return self.actor.compute_logprobs_and_entropies(micro_batches, routing="own")

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Compute with the reference's weights inside the block."""
        self._exchange()
        try:
            with without_adapters(self.actor.chunks):
                yield
        finally:
            self._exchange()

    def _parameters(self) -> dict[str, Tensor]:
        named = named_parameters(self.actor.chunks)
        return {name: parameter.detach() for name, parameter in named.items()}

    def _exchange(self) -> None:
        exchange(self.actor, self.inactive)


@dataclass
class KeptWeights:
    """A copy on the host of the actor's weights, to score later what they generate now.

    Only what is trained is copied.
    """

    actor: MegatronActor
    _copies: dict[str, Tensor] = field(default_factory=dict)
    _is_kept: bool = False

    def keep(self) -> None:
        """Copy the present weights over those of an earlier call."""
        trained = {
            name: parameter.detach()
            for name, parameter in named_parameters(self.actor.chunks).items()
            if parameter.requires_grad
        }
        if not self._copies:
            tensors = list(trained.values())
            on_cuda = self.actor.topology.device.type == "cuda"
            copies = PinnedMemory().copies_of(tensors) if on_cuda else [t.clone() for t in tensors]
            self._copies = dict(zip(trained, copies, strict=True))
        for name, copy in self._copies.items():
            copy.copy_(trained[name])
        self._is_kept = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute with the kept weights inside the block, and forget them; without any, nothing."""
        if not self._is_kept:
            yield
            return
        exchange(self.actor, self._copies)
        try:
            yield
        finally:
            exchange(self.actor, self._copies)
            self._is_kept = False


def exchange(actor: MegatronActor, inactive: Mapping[str, Tensor]) -> None:
    """Exchange the actor's parameters of these names with tensors on the host."""
    named = named_parameters(actor.chunks)
    pairs = [
        pair
        for name, tensor in inactive.items()
        for pair in zip(_pieces(named[name].detach()), _pieces(tensor), strict=True)
    ]
    on_cuda = actor.topology.device.type == "cuda"
    swap_through_streams(pairs) if on_cuda and pairs else swap(pairs)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield flat views of at most PIECE bytes."""
    yield from tensor.view(-1).split(PIECE // tensor.element_size())


def swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchange the values of both tensors of each pair."""
    for active, inactive in pairs:
        kept = active.clone()
        active.copy_(inactive)
        inactive.copy_(kept)


def swap_through_streams(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchange tensors on the device with page-locked ones on the host, without a wait of the host.

    Both directions of the link are used at the same time: while one pair's values go down, the next
    pair's come up. Later work of the current stream runs after all copies.
    """
    current, up, down = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    size = max((active.nbytes for active, _ in pairs), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=pairs[0][0].device) for _ in range(2)]
    emptied: list[torch.cuda.Event] = []  # by pair: its buffer was copied to the host
    up.wait_stream(current)
    for index, (active, inactive) in enumerate(pairs):
        kept = buffers[index % 2][: active.nbytes].view(active.dtype)
        with torch.cuda.stream(up):
            if index >= 2:
                up.wait_event(emptied[index - 2])
            kept.copy_(active)
            active.copy_(inactive, non_blocking=True)
            read = up.record_event()
        with torch.cuda.stream(down):
            down.wait_event(read)  # the host's values were read, so they may be overwritten
            inactive.copy_(kept, non_blocking=True)
            emptied.append(down.record_event())
    current.wait_stream(up)
    current.wait_stream(down)
