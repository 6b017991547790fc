"""This rank's shard of a pack, prepared once for model and objective, and its pipeline transfer.

Packs have different numbers of tokens. Megatron therefore sends the shape of every tensor ahead of
it, and the host waits for the device twice per tensor to read that shape. Here every stage knows
every pack, so nothing is sent ahead and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_rl.actor.layers import PackContext
from megatron_rl.actor.model import HeadOutputs, ModelInput
from megatron_rl.actor.rotary import PackRotation, RotationTables, build_rotation
from megatron_rl.data.packing import build_pack
from megatron_rl.distributed.collectives import to_device
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
from megatron_rl.types import SamplingMask, TokenBatch


@dataclass
class LocalPack:
    """The layout and model input of a pack, which are the same in every pass."""

    layout: SequenceLayout
    inputs: ModelInput
    host: SequenceLayout  # the layout on the host
    # the tokens that the sampler kept at the n response positions; see `TokenBatch`
    sampling_mask: SamplingMask | None = None
    _local: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def shard(self, values: Tensor) -> Tensor:
        """Return this rank's part of a per-token tensor of the whole pack; [T] -> [t]."""
        return self._once(values, self.layout.shard)

    def spread(self, values: Tensor) -> Tensor:
        """Expand one value per response to every local token; [R] -> [t]."""
        return self._once(values, self.layout.spread_responses)

    def token_inputs(self, batch: TokenBatch, output: Tensor, outputs: HeadOutputs) -> TokenInputs:
        """Return the objective's inputs from the head's rows, [1 to 3, t]."""
        logprobs, *further = output
        entropy = further.pop(0) if outputs.entropy else None
        if batch.on_policy:
            behavior = logprobs.detach()
        else:
            assert batch.behavior_logprobs is not None, "compute behavior log-probs before updates"
            behavior = self.shard(batch.behavior_logprobs)
        rollout, reference = batch.rollout_logprobs, batch.reference_logprobs
        by_turn = batch.turn_advantages
        return TokenInputs(
            policy_logprobs=logprobs,
            behavior_logprobs=behavior,
            advantages=self.spread(batch.advantages) if by_turn is None else self.shard(by_turn),
            rollout_logprobs=None if rollout is None else self.shard(rollout),
            reference_logprobs=None if reference is None else self.shard(reference),
            entropy=entropy,
            divergence=further[0] if further else None,
            further={name: self.shard(values) for name, values in batch.further.items()},
        )

    def token_classes(self, batch: TokenBatch, count: int) -> TokenClasses | None:
        """Return the `count` classes of tokens that are reported separately; None without any."""
        if not count or batch.classes is None:
            return None
        return TokenClasses(self.shard(batch.classes), count)

    def _once(self, values: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
        """Return cut(values) on the device, cached while `values` is alive and unmodified.

        A rollout batch is trained on many times, but its log-probs and advantages are copied once.
        """
        version, local = self._local.get(values, (None, None))
        if version != values._version:
            local = cut(to_device(values, self.layout.device))
            self._local[values] = (values._version, local)
        return local


class PackParts(NamedTuple):
    """The parts of a `TokenBatch` that a pack is prepared from; nothing else of it is read."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    sequence_lengths: tuple[int, ...]
    joined: tuple[int, ...]
    parents: tuple[int, ...]
    used: tuple[int, ...]
    sampling_mask: SamplingMask | None

    @classmethod
    def of(cls, batch: TokenBatch) -> PackParts:
        return cls(**{name: getattr(batch, name) for name in cls._fields})

    def is_same(self, other: PackParts) -> bool:
        """True if the tensors are the same objects and the lengths are equal."""
        return all(
            one == two if isinstance(one, tuple) else one is two
            for one, two in zip(self, other, strict=True)
        )


class PackCache:
    """Cache of prepared packs, each kept while the caller keeps the pack.

    A rollout batch is used many times; layout and attention plan are computed once, and the tables
    of the rotation once for all packs. The key is the identity of the pack's response mask; a pack
    whose other parts are replaced is prepared again. Preparing a pack needs no device sync:
    everything that depends on values is computed on the host. on_prepare: called on every use.
    """

    def __init__(
        self,
        shape: ModelShape,
        topology: Topology,
        *,
        dtype: torch.dtype,
        on_prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.shape, self.topology, self.dtype = shape, topology, dtype
        self.on_prepare = on_prepare
        self._packs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tables: dict[ModelShape, RotationTables] = {}

    def prepare(self, batch: TokenBatch) -> LocalPack:
        """Return this rank's view of a pack, from the cache if possible."""
        self.on_prepare()
        parts = PackParts.of(batch)
        known, pack = self._packs.get(batch.response_mask, (None, None))
        if known is None or not parts.is_same(known):
            pack = self._build(parts, batch.response_mask)
            self._packs[batch.response_mask] = (parts, pack)
        return pack

    def context(self, batch: TokenBatch) -> PackContext:
        """Return what the model's layers receive with a pack."""
        return self.prepare(batch).inputs.context

    def clear(self) -> None:
        """Free the device memory of all packs; they are prepared again on the next use."""
        self._packs.clear()

    def _build(self, batch: PackParts, response_mask: Tensor) -> LocalPack:
        device = self.topology.device
        host = self._layout(batch, response_mask)
        tokens, labels, positions = map(
            host.shard, (batch.tokens, batch.labels, batch.position_ids)
        )
        response_positions = host.mask.nonzero().squeeze(1)
        layout = host
        if device != response_mask.device:
            layout = self._layout(batch, to_device(response_mask, device))
        local = self.shape.local_rotary
        inputs = ModelInput(
            tokens=to_device(tokens[None], device),
            labels=to_device(labels[response_positions], device),
            response_positions=to_device(response_positions, device),
            context=PackContext(
                layout=layout,
                host=host,
                rotation=self._rotation(positions, self.shape),
                local_rotation=None if local is None else self._rotation(positions, local),
            ),
        )
        mask = batch.sampling_mask
        if mask is not None:
            places = host.shard(torch.arange(len(batch.tokens)))
            mask = mask.select(places[response_positions])
        return LocalPack(layout, inputs, host, mask)

    def _rotation(self, positions: Tensor, shape: ModelShape) -> PackRotation:
        """Return the rotation of positions [t] on the host; the tables grow by powers of two."""
        device, longest = self.topology.device, int(positions.max()) + 1
        tables = self._tables.get(shape)
        if tables is None or longest > len(tables.cosine):
            rows = torch.arange(1 << (longest - 1).bit_length(), device=device)
            tables = self._tables[shape] = build_rotation(rows, shape, dtype=self.dtype)
        return PackRotation(tables, to_device(positions.int(), device))

    def _layout(self, batch: PackParts, response_mask: Tensor) -> SequenceLayout:
        return SequenceLayout(
            batch.sequence_lengths,
            response_mask,
            joined=batch.joined,
            parents=batch.parents,
            used=batch.used,
            cp_rank=self.topology.cp_rank,
            cp_size=self.topology.cp_size,
            cp_group=self.topology.cp_group if self.topology.cp_size > 1 else None,
        )


def check_pack(batch: TokenBatch, *, alignment: int, vocab_size: int) -> None:
    """Raise ValueError if a pack does not match the layout or the vocabulary."""
    for length in batch.sequence_lengths:
        if length % alignment:
            raise UserError(
                f"a sequence of the pack has padded length {length}; it must be a multiple of "
                f"{alignment} (2 cp, times tp with sequence parallelism)"
            )
    highest = int(torch.maximum(batch.tokens.max(), batch.labels.max()))
    if highest >= vocab_size:
        raise UserError(f"token id {highest} is outside the model's vocabulary of {vocab_size}")


def build_filler(alignment: int, gemm_tokens: int) -> TokenBatch:
    """Build a pack without response tokens, which adds zero to every sum."""
    pack = build_pack([], torch.empty(0), indices=(), alignment=alignment, gemm_tokens=gemm_tokens)
    zeros = pack.response_mask.float()
    return replace(pack, behavior_logprobs=zeros, reference_logprobs=zeros)


_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]  # those that Megatron's schedules use


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one pass over micro-batches of known sizes.

    tokens: of each micro-batch on one context-parallel rank, in order. A stage receives and sends
    in the order in which Megatron's schedules execute micro-batches and model chunks.
    """

    def __init__(self, *, config: TransformerConfig, tokens: Sequence[int]) -> None:
        super().__init__(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._shapes = [[count // shards, 1, config.hidden_size] for count in tokens]
        chunks = config.virtual_pipeline_model_parallel_size or 1
        order = get_schedule_table(
            len(tokens), chunks, config.microbatch_group_size_per_vp_stage
        )  # (micro-batch, model chunk); the backward pass counts model chunks from the last
        last = self.pp_group.size() - 1
        begins, ends = self.pp_group.rank() == 0, self.pp_group.rank() == last
        # The input's side of the model is open at chunk 0 of the first stage; mirrored, the
        # output's side is open at chunk 0 (from the last) of the last stage.
        inner = [batch for batch, chunk in order if chunk > 0]
        left = [batch for batch, chunk in order if chunk < chunks - 1]
        every = [batch for batch, _ in order]
        self._from_previous = self._walk(inner if begins else every)
        self._to_next = self._walk(left if ends else every)
        self._from_next = self._walk(inner if ends else every)
        self._to_previous = self._walk(left if begins else every)

    def _walk(self, batches: Sequence[int]) -> Iterator[list[int]]:
        return iter([self._shapes[batch] for batch in batches])

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the shapes of the tensors to receive from the previous and the next stage."""
        for tensor, shapes in (
            (tensor_send_next, self._to_next),
            (tensor_send_prev, self._to_previous),
        ):
            if tensor is not None:
                shape = next(shapes)
                assert list(tensor.shape) == shape, (
                    f"a stage sends {list(tensor.shape)} where the others expect {shape}: "
                    "Megatron's schedule has another order"
                )
        none = [0, 0, 0]
        from_previous = next(self._from_previous) if recv_prev else none
        return from_previous, next(self._from_next) if recv_next else none


def pipeline_arguments(config: TransformerConfig, *, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the arguments with which Megatron's schedule uses `KnownShapes`; {} for one stage."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    return {
        "p2p_communicator": KnownShapes(config=config, tokens=tokens),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
    }


def gather_packs(
    layouts: Sequence[SequenceLayout], local: Sequence[Tensor], *, rows: int, topology: Topology
) -> list[Tensor]:
    """Gather the last stage's [rows, t] of each pack to [T, rows] on all ranks of a replica.

    local: of each pack, on the last stage; other stages receive them.
    """
    sizes = [layout.local_tokens for layout in layouts]
    if topology.is_last_stage:
        flat = torch.cat(list(local), dim=1)
    else:
        flat = torch.empty((rows, sum(sizes)), dtype=torch.float32, device=topology.device)
    if topology.pp_size > 1:
        dist.broadcast(flat, group=topology.pp_group, group_src=topology.pp_size - 1)
    parts = zip(layouts, flat.split(sizes, dim=1), strict=True)
    return [layout.gather(part.t().contiguous()) for layout, part in parts]
