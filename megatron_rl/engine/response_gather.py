"""Sending of responses from the ranks that generated them to those that need them.

Every rank receives which responses there are, how long they are and how they ended. Their columns
(`types.TOKEN_COLUMNS`) and texts stay on the rank that generated them and go to rank 0, which
writes them; only where a call wants them everywhere, they go to every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.token_rows import WRITER, Delivery, elsewhere
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.types import TOKEN_COLUMNS, FinishReason

_FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True, eq=False)
class Generated:
    """One response as its engine generated it."""

    position: int  # among all responses of the call
    token_ids: np.ndarray  # [L] int32
    rollout_logprobs: np.ndarray  # [L] float32
    finish_reason: FinishReason
    text: str
    owner: int = -1  # as in `types.Response`


def gather_seconds(own: float, *, device: torch.device) -> list[float]:
    """Gather every rank's seconds; collective over all processes."""
    seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    seconds[dist.get_rank()] = own
    if dist.get_world_size() > 1:
        dist.all_reduce(seconds)
    return seconds.tolist()


def gather_responses(own: Sequence[Generated], *, everywhere: bool) -> list[Generated]:
    """Return all ranks' responses ordered by position; collective over all processes.

    everywhere: with their columns and texts on every rank; else on the rank that has them and on
    rank 0.
    """
    own = sorted(own, key=lambda response: response.position)
    if dist.get_world_size() == 1:
        return list(own)
    texts = [np.frombuffer(response.text.encode(), np.uint8) for response in own]
    heads = [
        (r.position, _FINISH_REASONS.index(r.finish_reason), len(text),
         *(len(getattr(r, name)) for name in TOKEN_COLUMNS))
        for r, text in zip(own, texts, strict=True)
    ]  # fmt: skip
    gathered = gather_from_ranks(np.array(heads, np.int64).reshape(-1, 3 + len(TOKEN_COLUMNS)))
    ranks = np.repeat(np.arange(len(gathered)), [len(each) for each in gathered])
    order = np.argsort(np.concatenate(gathered)[:, 0], kind="stable")
    sources: list[int] = ranks[order].tolist()
    positions, reasons, text_sizes, *sizes = np.concatenate(gathered)[order].T.tolist()

    targets = [range(len(gathered)) if everywhere else (WRITER,)] * len(sources)
    mine = {response.position: place for place, response in enumerate(own)}
    places = [mine.get(position) for position in positions]
    columns: dict[str, Any] = {
        name: Delivery(lengths, sources, targets).send(
            [
                elsewhere(length) if place is None else getattr(own[place], name).astype(dtype)
                for place, length in zip(places, lengths, strict=True)
            ],
            dtype,
        )
        for (name, dtype), lengths in zip(TOKEN_COLUMNS.items(), sizes, strict=True)
    }
    letters = Delivery(text_sizes, sources, targets).send(
        [None if place is None else texts[place] for place in places], "uint8"
    )
    return [
        Generated(
            position=position,
            finish_reason=_FINISH_REASONS[reasons[index]],
            text="" if (text := letters[index]) is None else text.tobytes().decode(),
            owner=-1 if everywhere else sources[index],
            **{name: rows[index] for name, rows in columns.items()},
        )
        for index, position in enumerate(positions)
    ]
