"""The routes of a step's behavior pass in the files of a checkpoint.

The updates of a step compare or replay the experts that the behavior pass recorded, and a run that
resumes after an update no longer has the weights to record them again. Every rank writes its share
to a file of its own: the experts of its layers for its tokens, each token named by its rollout, its
sequence in the rollout and its position. A run with another layout takes its share from all files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.types import TokenBatch

NAME = "routes_{:05d}.pt"  # by rank
_POSITION_BITS = 24  # of the 32 of a token in its rollout; the others number its sequences


def write_routes(folder: Path, packs: Sequence[TokenBatch], actor: MegatronActor) -> None:
    """Write this rank's share; nothing if no routes were recorded."""
    parts = [
        {"tokens": _tokens(pack, actor), "routes": pack.routes.cpu()}
        for pack in packs
        if pack.routes is not None
    ]
    if parts:
        content = {"layers": _layers(actor), "parts": parts}
        torch.save(content, folder / NAME.format(actor.topology.rank))


def read_routes(folder: Path, packs: Sequence[TokenBatch], actor: MegatronActor) -> None:
    """Give packs the routes that a checkpoint contains, if it contains any.

    Padding that the run before did not have is assigned to the first experts. Raises ValueError if
    the files lack a token.
    """
    known = list(_read(folder))
    if not known:
        return
    layers = _layers(actor)
    for pack in packs:
        tokens = _tokens(pack, actor)
        k = known[0][2].shape[2]
        routes = torch.arange(k).repeat(len(layers), len(tokens), 1).to(known[0][2].dtype)
        missing = torch.ones(len(layers), len(tokens), dtype=torch.bool)
        for their_layers, their_tokens, theirs in known:
            order = their_tokens.argsort()
            ordered = their_tokens[order]
            places = torch.searchsorted(ordered, tokens).clamp(max=len(ordered) - 1)
            own = (ordered[places] == tokens).nonzero().squeeze(1)
            for row, layer in enumerate(layers):
                if layer in their_layers:
                    source = theirs[their_layers.index(layer)]
                    routes[row, own] = source[order[places[own]]]
                    missing[row, own] = False
        is_used = actor.routing.own_part(actor.packs.prepare(pack).host.is_used)
        if (lost := missing[:, is_used]).any():
            raise ValueError(f"routes of {int(lost.sum())} tokens are missing in {folder}")
        pack.routes = routes.to(actor.topology.device)


def _read(folder: Path) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield layers, tokens and routes of each pack of each rank."""
    for file in sorted(folder.glob(NAME.replace("{:05d}", "*"))):
        content: dict[str, Any] = torch.load(file, weights_only=True)
        for part in content["parts"]:
            yield content["layers"], part["tokens"], part["routes"]


def _layers(actor: MegatronActor) -> list[int]:
    return [layer.number for layer in actor.routing.layers]


def _tokens(pack: TokenBatch, actor: MegatronActor) -> Tensor:
    """Return the key of each token whose routes this rank has; [t] int64."""
    layout = actor.packs.prepare(pack).host
    return actor.routing.own_part(layout.shard(token_keys(pack)))


def token_keys(pack: TokenBatch) -> Tensor:
    """Return a key of each token: its rollout, sequence in the rollout and position; [T] int64."""
    joined = pack.joined or (1,) * len(pack.rollout_indices)
    sequences = [
        (index << 32) + (number << _POSITION_BITS)
        for index, count in zip(pack.rollout_indices, joined, strict=True)
        for number in range(count)
    ]
    assert max(joined) <= 1 << 32 - _POSITION_BITS
    assert max(pack.sequence_lengths) <= 1 << _POSITION_BITS
    names = torch.tensor(sequences).repeat_interleave(torch.tensor(pack.sequence_lengths))
    return names + pack.position_ids
