"""The reference policy of a KL term: frozen weights that rest on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.weights import load_weights
from megatron_rl.types import TokenBatch


class ReferencePolicy:
    """Weights of a Hugging Face folder, cut as the actor's, that stand in for the actor's own.

    To score, they change places with the actor's parameters, one at a time: on the device no more
    memory is needed than the largest parameter, and every layout, kernel and pack is the policy's.

    Raises ValueError naming the tensors that the folder lacks or has in another shape.
    """

    def __init__(self, actor: MegatronActor, folder: str | Path) -> None:
        self.actor = actor
        on_cuda = actor.topology.device.type == "cuda"
        self.weights = {
            name: torch.empty_like(parameter, device="cpu", pin_memory=on_cuda).detach()
            for name, parameter in actor.named_parameters_local().items()
        }
        load_weights(self.weights, shape=actor.shape, topology=actor.topology, folder=folder)

    def compute_logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Log-probs of the labels, [T] per pack, 0 off the mask; as the actor's own."""
        with self._in_place():
            return self.actor.compute_logprobs(micro_batches)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self.actor.named_parameters_local().items():
            resting = self.weights[name]
            active = parameter.detach().clone()
            parameter.copy_(resting)
            resting.copy_(active)
