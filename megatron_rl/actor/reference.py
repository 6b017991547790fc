"""The reference policy of a KL term: frozen weights kept on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.checkpoint import load_model
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.memory import PinnedMemory
from megatron_rl.types import TokenBatch


class ReferencePolicy:
    """Weights of another model folder, sharded like the actor's and swapped in for scoring.

    Parameters are swapped with the actor's one at a time: this needs device memory for only one
    additional parameter, and the reference uses the policy's layouts, kernels and packs.

    Raises ValueError naming the tensors that the folder lacks or has in another shape.
    """

    def __init__(self, actor: MegatronActor, folder: str | Path) -> None:
        self.actor = actor
        named, on_cuda = self._parameters(), actor.topology.device.type == "cuda"
        tensors = list(named.values())
        copies = PinnedMemory().copies_of(tensors) if on_cuda else [t.clone() for t in tensors]
        self.inactive = dict(zip(named, copies, strict=True))
        try:
            with megatron_runtime():
                load_model(actor.chunks, shape=actor.shape, topology=actor.topology, folder=folder)
        finally:
            self._exchange()  # restore the policy's weights

    def compute_logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Compute log-probs of the labels, [T] per pack, 0 off the mask."""
        self._exchange()
        try:
            return self.actor.compute_logprobs(micro_batches)
        finally:
            self._exchange()

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute log-probs and this policy's entropies (nats) of each pack."""
        self._exchange()
        try:
            return self.actor.compute_logprobs_and_entropies(micro_batches)
        finally:
            self._exchange()

    def _parameters(self) -> dict[str, Tensor]:
        named = self.actor.named_parameters_local()
        return {name: parameter.detach() for name, parameter in named.items()}

    def _exchange(self) -> None:
        for name, parameter in self._parameters().items():
            active = parameter.clone()
            parameter.copy_(self.inactive[name])
            self.inactive[name].copy_(active)
