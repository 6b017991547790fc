"""Routing of tokens to experts: recorded in the behavior pass, then compared or replayed.

A router chooses k experts for each token. After an update it may choose others, and the policy's
log-probs then change with the choice as well as with the weights. `RoutingRecorder` records the
choices of the pass that computes behavior log-probs, or takes those of the engine. Updates either
choose again and count how many choices changed, or replay the recorded ones (arXiv 2510.11370). The
weights of the chosen experts in the mixture are always those of the present router, which therefore
learns.

Megatron's own `RouterReplay` keeps the choices in global queues that some passes leave filled. Here
a layer reads the choices from the pack that it processes, also when it is recomputed in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_rl.actor.layers import PackContext
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.models.shape import ModelShape
from megatron_rl.types import TokenBatch

# default: as `model.routing_replay` requires; record: choose, and keep the choices with the pack,
# or replay those that it has already; recorded: replay; own: choose.
Routing = Literal["default", "record", "recorded", "own"]


@dataclass
class PackRouting:
    """The choices for one pack in one pass.

    experts: [t, k] per layer, as in `TokenBatch.routes`. is_used: [t], False for padding. counts:
    [layers, 2] float64 of the model: tokens whose set of experts changed, and all tokens; None: not
    counted. has_gradients: the pass is an update's, in which a recomputed layer runs twice.
    """

    experts: list[Tensor]
    action: Literal["record", "compare", "replay"]
    is_used: Tensor | None = None
    counts: Tensor | None = None
    has_gradients: bool = False

    @property
    def is_counting(self) -> bool:
        """True in exactly one forward pass of each layer: with gradients in an update."""
        return self.counts is not None and torch.is_grad_enabled() == self.has_gradients


class LayerRouting:
    """Chooses the experts of one layer; stands where Megatron's router has its `RouterReplay`.

    place: among this rank's layers with experts.
    """

    def __init__(self, layer: Any, place: int) -> None:
        self.place = place
        self.number: int = layer.layer_number - 1  # in the whole model
        self.context: PackContext | None = None  # of the pack that the layer processes
        layer.mlp.router.router_replay = self
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            # Its recomputation begins after the hook, so it must remember the pack itself.
            layer.mlp.moe_layer_recompute = False
            layer.mlp.forward = self._recomputed(layer.mlp.forward, fp8=layer.mlp.config.fp8)

    def _enter(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.context = kwargs["packed_seq_params"]

    def _recomputed(self, forward: Callable[..., Any], *, fp8: object) -> Callable[..., Any]:
        def checkpointed(hidden: Tensor, **kwargs: Any) -> Any:
            context = self.context

            def run(hidden: Tensor) -> Any:
                self.context = context
                return forward(hidden, **kwargs)

            if fp8:
                tracker = tensor_parallel.random.get_cuda_rng_tracker
                group = parallel_state.get_tensor_model_parallel_group()
                return te_checkpoint(run, False, tracker, group, hidden)
            return tensor_parallel.checkpoint(run, False, hidden)

        return checkpointed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the chosen experts, [t, k] each; scores [t, experts]."""
        assert self.context is not None, "the layer was called without a pack"
        routing = self.context.routing
        if routing is None:
            return choose(scores, topk, num_groups, group_topk)
        if routing.action == "record":
            values, chosen = choose(scores, topk, num_groups, group_topk)
            routing.experts[self.place] = chosen.to(expert_dtype(scores.shape[1]))
            return values, chosen
        recorded = routing.experts[self.place].to(scores.device, torch.int64)
        replays = routing.action == "replay"
        if replays and not routing.is_counting:
            return scores.gather(1, recorded), recorded
        values, chosen = choose(scores, topk, num_groups, group_topk)
        if routing.is_counting:
            assert routing.counts is not None and routing.is_used is not None
            is_new = (chosen[:, :, None] != recorded[:, None]).all(2).any(1)  # [t]
            routing.counts[self.number, 0] += (is_new & routing.is_used).sum()
            routing.counts[self.number, 1] += routing.is_used.sum()
        return (scores.gather(1, recorded), recorded) if replays else (values, chosen)


def expert_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype of expert numbers."""
    return torch.uint8 if num_experts <= 256 else torch.int16


class RoutingRecorder:
    """Records, compares and replays the routing of all layers of one actor.

    A model without experts has nothing to record. replays: passes over packs with recorded choices
    replay them.
    """

    def __init__(
        self, chunks: Sequence[Any], *, shape: ModelShape, replays: bool, topology: Topology
    ) -> None:
        self.replays, self.topology = replays, topology
        self.num_layers = shape.num_layers if shape.experts else 0
        self.num_experts = shape.experts.num_experts if shape.experts else 0
        self.parts = topology.tp_size if chunks[0].config.sequence_parallel else 1
        decoders = (layer for chunk in chunks for layer in chunk.decoder.layers)
        routed = [layer for layer in decoders if isinstance(layer.mlp, MoELayer)]
        self.layers = [LayerRouting(layer, place) for place, layer in enumerate(routed)]
        self.counts = self._zeros()

    @property
    def is_active(self) -> bool:
        """True for a model with experts."""
        return self.num_layers > 0

    @contextmanager
    def applied(
        self,
        batches: Sequence[TokenBatch],
        context_of: Callable[[TokenBatch], PackContext],
        *,
        routing: Routing,
        has_gradients: bool,
    ) -> Iterator[None]:
        """Apply `routing` to the passes inside the block; recorded choices are then in `batches`.

        Packs that are not in `batches` choose for themselves.
        """
        if not self.layers:
            yield
            return
        contexts = [context_of(batch) for batch in batches]
        for batch, context in zip(batches, contexts, strict=True):
            context.routing = self._of(batch, routing, context, has_gradients=has_gradients)
        try:
            yield
            for batch, context in zip(batches, contexts, strict=True):
                if context.routing is not None and context.routing.action == "record":
                    batch.routes = torch.stack(context.routing.experts)
        finally:
            for context in contexts:
                context.routing = None

    def use_engine_routes(
        self, batches: Sequence[TokenBatch], layout_of: Callable[[TokenBatch], SequenceLayout]
    ) -> None:
        """Turn the engine's routes of packs into recorded ones: this rank's layers and tokens.

        layout_of: the layout of a pack on the host. Padding is spread over the experts. The passes
        that follow replay them, the behavior pass too, in the engine's order of a token's experts.
        """
        for batch in batches:
            if batch.engine_routes is None:
                continue
            layout = layout_of(batch)
            own = self.own_part(layout.shard(batch.engine_routes)).contiguous()
            own = own.view(expert_dtype(self.num_experts)).unflatten(1, (self.num_layers, -1))
            k = own.shape[2]
            spread = torch.arange(own.shape[0] * k).view(-1, 1, k) % self.num_experts
            own = torch.where(self.own_part(layout.is_used)[:, None, None], own, spread.to(own))
            numbers = [layer.number for layer in self.layers]
            batch.routes = own[:, numbers].transpose(0, 1).contiguous().to(self.topology.device)
            batch.engine_routes = None

    def own_part(self, shard: Tensor) -> Tensor:
        """Return the part of a context-parallel shard that this rank's layers process; [t, ...].

        Under sequence parallelism each tensor-parallel rank has another part.
        """
        return shard.chunk(self.parts)[self.topology.tp_rank if self.parts > 1 else 0]

    def _of(
        self,
        batch: TokenBatch,
        routing: Routing,
        context: PackContext,
        *,
        has_gradients: bool,
    ) -> PackRouting | None:
        if batch.routes is None:
            nothing = [torch.empty(0)] * len(self.layers)
            return PackRouting(nothing, "record") if routing == "record" else None
        known = list(batch.routes)
        if routing == "own":
            return None
        if routing == "recorded":
            return PackRouting(known, "replay")
        is_counted = has_gradients or routing == "record"
        if not (self.replays or routing == "record" or is_counted):
            return None
        assert context.layout is not None
        return PackRouting(
            known,
            "replay" if self.replays or routing == "record" else "compare",
            self.own_part(context.layout.is_used),
            self.counts if is_counted else None,
            has_gradients,
        )

    def pop_counts(self) -> Tensor | None:
        """Return changed and all tokens by layer since the last call, [layers, 2]; collective.

        Sums over all ranks, equal on each; where ranks have the same tokens both columns count
        them equally often. None for a model without experts.
        """
        if not self.is_active:
            return None
        counts, self.counts = self.counts, self._zeros()
        for group in (self.topology.dp_cp_group, self.topology.tp_group, self.topology.pp_group):
            counts = reduce_sum(counts, group=group)
        return counts

    def _zeros(self) -> Tensor:
        return torch.zeros(self.num_layers, 2, dtype=torch.float64, device=self.topology.device)
