"""The reference policy of a KL term: frozen weights of any shape, kept on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.build import build_chunks
from megatron_rl.actor.cpu_adaptation import megatron_runtime
from megatron_rl.actor.lora import without_adapters
from megatron_rl.actor.memory import PinnedMemory
from megatron_rl.actor.packs import PackCache
from megatron_rl.actor.routing import RoutingRecorder
from megatron_rl.actor.scoring import ScoringModel
from megatron_rl.actor.weights import load_model, named_parameters
from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.types import ReferenceHead, ReferenceParts, ReferenceTop, TokenBatch

PIECE = 64 << 20  # bytes of a parameter that are exchanged at once


class FrozenModel(ScoringModel):
    """A reference whose shape differs from the policy's, as separate chunks under the same layout.

    Its weights are on the device only while it scores, and else in page-locked memory of the host.
    """

    def __init__(self, folder: str | Path, *, shape: ModelShape, actor: MegatronActor) -> None:
        self.shape, self.topology = shape, actor.topology
        self.settings = replace(actor.settings, lora=None, replay_routes=False)
        self.packs = PackCache(
            shape, self.topology, dtype=self.settings.dtype, on_prepare=actor.packs.on_prepare
        )
        with megatron_runtime():
            self.chunks = build_chunks(shape, settings=self.settings, topology=self.topology)
            load_model(self.chunks, shape=shape, topology=self.topology, folder=folder)
        self.modules = self.chunks
        self.routing = RoutingRecorder(
            self.chunks, shape=shape, topology=self.topology, replays=False
        )
        self.parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        self.on_host: list[Tensor] = []
        if self.topology.device.type == "cuda":
            self.on_host = PinnedMemory().copies_of([p.data for p in self.parameters])
            torch.cuda.synchronize()
            self._leave_device()

    @contextmanager
    def on_device(self) -> Iterator[FrozenModel]:
        """Have the weights on the device inside the block."""
        for parameter, copy in zip(self.parameters, self.on_host, strict=bool(self.on_host)):
            parameter.data = copy.to(self.topology.device, non_blocking=True)
        try:
            yield self
        finally:
            self._leave_device()
            self.packs.clear()

    def _leave_device(self) -> None:
        for parameter, copy in zip(self.parameters, self.on_host, strict=bool(self.on_host)):
            parameter.data = copy


class ReferencePolicy:
    """Weights of another model folder, sharded like the actor's and swapped in for scoring.

    A model of another shape with the same vocabulary is a `FrozenModel` instead. Else parameters
    are swapped with the actor's piece by piece: this needs device memory for only two
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
        shape = read_model_shape(folder)
        self.other = None
        if shape != actor.shape:
            self.other = FrozenModel(folder, shape=shape, actor=actor)
            return
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
        with self._active() as model:
            return model.compute_logprobs(micro_batches, routing="own")

    def compute_logprobs_and_entropies(
        self, micro_batches: Sequence[TokenBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute log-probs and this policy's entropies (nats) of each pack."""
        with self._active() as model:
            return model.compute_logprobs_and_entropies(micro_batches, routing="own")

    def compute_head_inputs(
        self, micro_batches: Sequence[TokenBatch], *, top_k: int | None = None
    ) -> list[ReferenceHead | ReferenceTop] | None:
        """Compute what a divergence over the vocabulary needs, on the last stage; None on others.

        The reference then has the tokens, temperature and layout of the policy's updates.
        """
        with self._active() as model:
            return model.compute_head_inputs(micro_batches, routing="own", top_k=top_k)

    @contextmanager
    def _active(self) -> Iterator[ScoringModel]:
        """Return the model that has the reference's weights inside the block."""
        if self.other is not None:
            with self.other.on_device():
                yield self.other
            return
        self._exchange()
        try:
            with without_adapters(self.actor.chunks):
                yield self.actor
        finally:
            self._exchange()

    def _parameters(self) -> dict[str, Tensor]:
        named = named_parameters(self.actor.chunks)
        return {name: parameter.detach() for name, parameter in named.items()}

    def _exchange(self) -> None:
        named = self._parameters()
        exchange([named[name] for name in self.inactive], list(self.inactive.values()))


class References:
    """The reference policies of a run: one, or one for each data source.

    folders: model folder by data source; None: of all sources. Two sources may have the same.
    """

    def __init__(self, actor: MegatronActor, folders: Mapping[str | None, str]) -> None:
        self.actor = actor
        sources: dict[str, list[str | None]] = {}
        for source, folder in folders.items():
            sources.setdefault(str(Path(folder).resolve()), []).append(source)
        self.sources = list(sources.values())
        self.policies = [ReferencePolicy(actor, folder) for folder in sources]

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise UserError for a data source without a reference."""
        known = {one for own in self.sources for one in own}
        if None not in known and (missing := sorted(set(sources) - known)):
            raise UserError(
                f"model.reference has none for the rollouts of data_source {missing[0]!r}, only "
                f"for {', '.join(map(str, known))}; add one under this name"
            )

    def compute_logprobs(
        self, packs: Sequence[TokenBatch], sources: Sequence[Sequence[str | None]]
    ) -> list[Tensor]:
        """Compute log-probs of the labels by the reference of each response; [T] per pack.

        sources: of each pack's responses, [R] each. 0 off the mask. Collective.
        """
        if None in self.sources[0]:
            return self.policies[0].compute_logprobs(packs)
        device = self.actor.topology.device
        found = [torch.zeros(len(pack.tokens), device=device) for pack in packs]
        for policy, masks in self._assign(packs, sources):
            scored = policy.compute_logprobs([packs[index] for index in masks])
            for (index, mask), logprobs in zip(masks.items(), scored, strict=True):
                found[index] += torch.where(mask.to(device), logprobs, 0)
        return found

    def compute_head_inputs(
        self,
        packs: Sequence[TokenBatch],
        sources: Sequence[Sequence[str | None]],
        *,
        top_k: int | None = None,
    ) -> Sequence[ReferenceHead | ReferenceTop | ReferenceParts] | None:
        """Compute what a divergence over the vocabulary needs, on the last stage; None on others.

        sources: as of `compute_logprobs`. Collective.
        """
        if None in self.sources[0]:
            return self.policies[0].compute_head_inputs(packs, top_k=top_k)
        parts: list[list[tuple[Tensor, ReferenceHead | ReferenceTop]]] = [[] for _ in packs]
        for policy, masks in self._assign(packs, sources):
            heads = policy.compute_head_inputs([packs[index] for index in masks], top_k=top_k)
            for (index, mask), head in zip(masks.items(), heads or (), strict=heads is not None):
                host = self.actor.packs.prepare(packs[index]).host
                positions = host.shard(mask)[host.mask].nonzero().squeeze(1)
                if len(positions):
                    parts[index].append((positions, select_tokens(head, positions)))
        if not self.actor.topology.is_last_stage:
            return None
        return [
            ReferenceParts(tuple(places for places, _ in own), tuple(part for _, part in own))
            for own in parts
        ]

    def _assign(
        self, packs: Sequence[TokenBatch], sources: Sequence[Sequence[str | None]]
    ) -> list[tuple[ReferencePolicy, dict[int, Tensor]]]:
        """Return each policy that has packs to score, with its tokens of these packs; [T] bool.

        With expert parallelism every pack is scored: experts are on several replicas.
        """
        assigned = []
        for policy, own in zip(self.policies, self.sources, strict=True):
            masks = {}
            for index, (pack, rows) in enumerate(zip(packs, sources, strict=True)):
                is_own = torch.tensor([one in own for one in rows], device="cpu")
                lengths = torch.tensor(pack.lengths, device="cpu")
                mask = pack.response_mask & torch.repeat_interleave(is_own, lengths)
                if self.actor.topology.ep_size > 1 or mask.any():
                    masks[index] = mask
            if masks:
                assigned.append((policy, masks))
        return assigned


def select_tokens(
    head: ReferenceHead | ReferenceTop, positions: Tensor
) -> ReferenceHead | ReferenceTop:
    """Return the part of some response tokens; [n_i] int64."""
    if isinstance(head, ReferenceHead):
        return ReferenceHead(head.hidden[positions], head.weight)
    return ReferenceTop(**{key: values[positions] for key, values in vars(head).items()})


@dataclass
class KeptWeights:
    """A copy on the host of the weights that the actor trains, to score later what they generate.

    With adapters these are the adapters alone.
    """

    actor: MegatronActor
    _copies: list[Tensor] = field(default_factory=list)
    _is_kept: bool = False

    def _trained(self) -> list[Tensor]:
        chunks = self.actor.chunks
        return [p.detach() for chunk in chunks for p in chunk.parameters() if p.requires_grad]

    def keep(self) -> None:
        """Copy the present weights over the weights that an earlier call kept."""
        trained = self._trained()
        if not self._copies:
            on_cuda = self.actor.topology.device.type == "cuda"
            memory = PinnedMemory()
            self._copies = memory.copies_of(trained) if on_cuda else [t.clone() for t in trained]
        for copy, tensor in zip(self._copies, trained, strict=True):
            copy.copy_(tensor)
        self._is_kept = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute with the kept weights inside the block, and forget them; without any, nothing."""
        if not self._is_kept:
            yield
            return
        exchange(self._trained(), self._copies)
        try:
            yield
        finally:
            exchange(self._trained(), self._copies)
            self._is_kept = False


def exchange(active: Sequence[Tensor], inactive: Sequence[Tensor]) -> None:
    """Exchange the values of parameters with the values of tensors on the host."""
    pairs = [
        pair
        for one, other in zip(active, inactive, strict=True)
        for pair in zip(_pieces(one), _pieces(other), strict=True)
    ]
    on_cuda = any(one.is_cuda for one in active)
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
    """Exchange tensors on the device with page-locked tensors on the host; the host does not wait.

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
