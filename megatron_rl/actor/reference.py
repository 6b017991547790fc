"""The reference policy of a KL term: frozen weights that rest on the host."""

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
    """Weights of another model folder, cut as the actor's, that stand in for the actor's own.

    To score, they change places with the actor's parameters, one at a time: on the device no more
    memory is needed than the largest parameter, and every layout, kernel and pack is the policy's.

    Raises ValueError naming the tensors that the folder lacks or has in another shape.
    """

    def __init__(self, actor: MegatronActor, folder: str | Path) -> None:
        self.actor = actor
        named, on_cuda = self._parameters(), actor.topology.device.type == "cuda"
        held = list(named.values())
        copies = PinnedMemory().copies_of(held) if on_cuda else [each.clone() for each in held]
        self.resting = dict(zip(named, copies, strict=True))
        try:
            with megatron_runtime():
                load_model(actor.chunks, shape=actor.shape, topology=actor.topology, folder=folder)
        finally:
            self._exchange()  # the policy's own weights are back

    def compute_logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Log-probs of the labels, [T] per pack, 0 off the mask; as the actor's own."""
        self._exchange()
        try:
            return self.actor.compute_logprobs(micro_batches)
        finally:
            self._exchange()

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """The same log-probs, each pack's with this policy's entropies (nats)."""
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
            parameter.copy_(self.resting[name])
            self.resting[name].copy_(active)
