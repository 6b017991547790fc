"""The routes of a step's behavior pass in the files of a checkpoint.

The updates of a step compare or replay the experts that the behavior pass recorded, and a run that
resumes after an update no longer has the weights to record them again. Every rank writes its share
to a file of its own: the experts of its layers for its tokens, each token named by its rollout, its
sequence in the rollout and its position, once for every sequence that has it in common. A run with
another layout, or other packs, takes its share from all files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.types import TokenBatch

NAME = "routes_{:05d}.pt"  # by rank
NOBODY = torch.iinfo(torch.int64).min  # no key
_LEVEL_BITS = 56  # of padding behind a sequence that continues others, the number of those
_POSITION_BITS = 24  # of the 32 of a token in its rollout; the others number its sequences


def write_routes(folder: Path, packs: Sequence[TokenBatch], actor: MegatronActor) -> None:
    """Write this rank's share; nothing if no routes were recorded."""
    parts = []
    for pack in packs:
        if pack.routes is not None:
            names = torch.cat([_own(keys, pack, actor) for keys in token_keys(pack)])
            routes = pack.routes.cpu().repeat(1, len(token_keys(pack)), 1)
            known = names != NOBODY
            parts.append({"tokens": names[known], "routes": routes[:, known]})
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
        tokens = _own(token_keys(pack)[0], pack, actor)
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


def _own(keys: Tensor, pack: TokenBatch, actor: MegatronActor) -> Tensor:
    """Return the keys of the tokens whose routes this rank has; [T] -> [t] int64."""
    layout = actor.packs.prepare(pack).host
    return actor.routing.own_part(layout.shard(keys))


def token_keys(pack: TokenBatch) -> list[Tensor]:
    """Return keys of each token: its rollout, sequence in the rollout and position; [T] int64 each.

    The first column has a key for every token; further columns only for tokens that several
    sequences have in common, and NOBODY for other tokens.
    """
    joined = pack.joined or (1,) * len(pack.rollout_indices)
    readers = pack.readers or tuple(
        ((index, number),)
        for index, count in zip(pack.rollout_indices, joined, strict=True)
        for number in range(count)
    )
    sizes = torch.tensor(pack.sequence_lengths)
    assert max(number for own in readers for _, number in own) < 1 << 32 - _POSITION_BITS
    assert int(pack.position_ids.max()) < 1 << _POSITION_BITS
    keys = []
    for place in range(max(map(len, readers))):
        own = [one[place] if place < len(one) else None for one in readers]
        names = [NOBODY if one is None else (one[0] << 32) + (one[1] << _POSITION_BITS)
                 for one in own]  # fmt: skip
        spread = torch.tensor(names).repeat_interleave(sizes)
        named = torch.where(spread == NOBODY, spread, spread + pack.position_ids)
        keys.append(_apart(named, pack) if pack.parents else named)
    return keys


def _apart(keys: Tensor, pack: TokenBatch) -> Tensor:
    """Give padding other keys: behind a parent it has the positions of those that continue it."""
    levels: list[int] = []
    for parent in pack.parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    sizes = torch.tensor(pack.sequence_lengths)
    level, used, start = (
        torch.tensor(values).repeat_interleave(sizes)
        for values in (levels, pack.used, (sizes.cumsum(0) - sizes).tolist())
    )
    is_padding = (torch.arange(len(keys)) - start >= used) & (keys != NOBODY)
    return torch.where(is_padding, -keys - 1 - (level << _LEVEL_BITS), keys)
