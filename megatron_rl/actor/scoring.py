"""A model that scores packs: forward passes of Megatron-core chunks under any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.loss_contract import as_megatron_loss
from megatron_rl.actor.model import HeadOutputs, PolicyModel
from megatron_rl.actor.packs import (
    LocalPack,
    PackCache,
    build_filler,
    check_pack,
    gather_packs,
    pipeline_arguments,
)
from megatron_rl.actor.routing import Routing, RoutingRecorder
from megatron_rl.actor.settings import ActorSettings
from megatron_rl.actor.sharing import build_sharing
from megatron_rl.data.sharing import Sharing
from megatron_rl.distributed.collectives import to_device
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.vocab_divergence import top_tokens
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import ReferenceHead, ReferenceParts, ReferenceTop, TokenBatch


class ScoringModel:
    """The forward passes of a model's chunks on this rank; every rank of the layout has one.

    Subclasses build the attributes. modules: what Megatron's schedule runs, the chunks or their
    wrappers.
    """

    topology: Topology
    settings: ActorSettings
    shape: ModelShape
    chunks: list[PolicyModel]
    modules: list[Any]
    packs: PackCache
    routing: RoutingRecorder

    @property
    def sharing(self) -> Sharing | None:
        """When packs compute what their sequences have in common once; None: never."""
        on_te = self.chunks[0].config.transformer_impl == "transformer_engine"
        return build_sharing(self.settings, self.shape, on_transformer_engine=on_te)

    def compute_logprobs(
        self, micro_batches: Sequence[TokenBatch], *, routing: Routing = "default"
    ) -> list[Tensor]:
        """Compute log-probs of the labels, [T] per pack, 0 off the mask; on all replica ranks.

        Runs forward only, with the same code and packs as training, so that log-probs are
        bit-identical as long as the weights are. routing: how tokens are assigned to experts.
        """
        scored = self._score(micro_batches, entropy=False, routing=routing)
        return [values[:, 0] for values in scored]

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch], *, routing: Routing = "default"
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute log-probs as `compute_logprobs`, and the policy's entropies (nats) per token."""
        scored = self._score(micro_batches, entropy=True, routing=routing)
        # Copies: log-probs live as long as the rollout batch, and a view would keep the entropies.
        return [(values[:, 0].contiguous(), values[:, 1]) for values in scored]

    def _score(
        self, micro_batches: Sequence[TokenBatch], *, entropy: bool, routing: Routing
    ) -> list[Tensor]:
        """Compute log-probs, and entropies if requested, of each pack's labels; [T, 1|2]."""
        self._check(micro_batches)
        with megatron_runtime(), torch.no_grad():
            local = self._run(
                micro_batches,
                _keep_output,
                forward_only=True,
                outputs=HeadOutputs(entropy=entropy),
                routing=routing,
            )
        return self._gather(micro_batches, local[: len(micro_batches)], rows=1 + entropy)

    def compute_head_inputs(
        self,
        micro_batches: Sequence[TokenBatch],
        *,
        routing: Routing = "default",
        top_k: int | None = None,
    ) -> list[ReferenceHead | ReferenceTop] | None:
        """Compute the head's inputs of each pack, on the last stage; None on other stages.

        Hidden states are moved to the host. The weight is a copy. With `top_k`, the likeliest
        tokens instead, on the host.
        """
        self._check(micro_batches)
        with megatron_runtime(), torch.no_grad():
            states = self._run(
                micro_batches,
                _keep_states if top_k is None else partial(self._keep_top, top_k),
                forward_only=True,
                outputs=HeadOutputs(inputs_only=True),
                routing=routing,
            )
        if not self.topology.is_last_stage:
            return None
        if top_k is not None:
            return states[: len(micro_batches)]
        weight = self.chunks[-1].head_weight().detach().clone()
        return [ReferenceHead(hidden, weight) for hidden in states[: len(micro_batches)]]

    def _check(self, micro_batches: Sequence[TokenBatch]) -> None:
        alignment = self.topology.alignment
        for batch in micro_batches:
            check_pack(batch, alignment=alignment, vocab_size=self.shape.vocab_size)

    def _run(
        self,
        micro_batches: Sequence[TokenBatch],
        compute: Callable[[TokenBatch, LocalPack, Tensor], tuple[Tensor, Any]],
        *,
        forward_only: bool,
        outputs: HeadOutputs,
        routing: Routing = "default",
    ) -> list[Any]:
        """Run the micro-batches through Megatron's schedule.

        Returns the last stage's reports, [] on other stages. Filler packs complete the rounds that
        interleaved stages need; their reports come last.
        """
        missing = -len(micro_batches) % self.topology.round_size
        alignment = self.topology.alignment
        fillers = (build_filler(alignment, self.settings.gemm_tokens) for _ in range(missing))
        padded = [*micro_batches, *fillers]

        def step(batches: Any, model: Any) -> tuple[Tensor, Any]:
            batch = next(batches)
            pack = self.packs.prepare(batch)
            reference = batch.reference_head if outputs.divergence is not None else None
            if reference is not None:
                reference = move_reference(reference, self.topology.device)
            mask = None
            if pack.sampling_mask is not None:
                mask = to_device(pack.sampling_mask.padded(), self.topology.device)
            output = model(pack.inputs, outputs=outputs, reference=reference, sampling_mask=mask)
            return output, as_megatron_loss(partial(compute, batch, pack))

        tokens = [sum(batch.lengths) // self.topology.cp_size for batch in padded]
        with self.routing.applied(
            micro_batches, self.packs.context, routing=routing, has_gradients=not forward_only
        ):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(padded) for _ in self.modules],
                model=self.modules,
                num_microbatches=len(padded),
                seq_length=max(tokens),
                micro_batch_size=1,
                forward_only=forward_only,
                **pipeline_arguments(self.chunks[0].config, tokens=tokens),
            )

    def _keep_top(
        self, top_k: int, batch: TokenBatch, pack: LocalPack, output: Tensor
    ) -> tuple[Tensor, ReferenceTop]:
        """Report the likeliest tokens from the head's inputs, on the host."""
        head = self.chunks[-1]
        top = top_tokens(
            output,
            head.head_weight(),
            top_k=top_k,
            shard=head.vocab_shard,
            temperature=head.temperature,
        )
        return output.sum(), ReferenceTop(**{key: x.to("cpu") for key, x in vars(top).items()})

    def _gather(
        self, micro_batches: Sequence[TokenBatch], local: list[Tensor], *, rows: int
    ) -> list[Tensor]:
        """Gather the last stage's [rows, t] of each pack to [T, rows] on all replica ranks."""
        layouts = [self.packs.prepare(batch).layout for batch in micro_batches]
        return gather_packs(layouts, local, rows=rows, topology=self.topology)


Reference = TypeVar("Reference", ReferenceHead, ReferenceTop, ReferenceParts)


def move_reference(reference: Reference, device: torch.device) -> Reference:
    """Return what a reference gives to a pack with all its tensors on the device."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to_device(value, device)
        if isinstance(value, tuple):
            return tuple(move(one) for one in value)
        return replace(value, **{key: move(one) for key, one in vars(value).items()})

    moved: Reference = move(reference)
    return moved


def _keep_output(batch: TokenBatch, pack: LocalPack, output: Tensor) -> tuple[Tensor, Tensor]:
    """Report the output itself, for forward passes without a loss; [1|2, t]."""
    return output[0], output


def _keep_states(batch: TokenBatch, pack: LocalPack, output: Tensor) -> tuple[Tensor, Tensor]:
    """Report the head's inputs, on the host; [n, h]."""
    return output.sum(), output.to("cpu")
