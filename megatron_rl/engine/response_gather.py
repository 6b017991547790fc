"""Sending of responses from the ranks that generated them to those that need them.

Every rank receives which responses there are, how long they are, which of their tokens were
observed and how they ended. Their columns (`types.TOKEN_COLUMNS`) and texts stay on the rank that
generated them and go to rank 0, which writes them; only where a call wants them everywhere, they go
to every rank.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.token_rows import WRITER, Delivery, elsewhere
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.types import TOKEN_COLUMNS, FinishReason, GradeResult

_FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True, eq=False)
class Generated:
    """One response as its engine generated it."""

    position: int  # among all responses of the call
    token_ids: np.ndarray  # [K] int32
    rollout_logprobs: np.ndarray  # [L] float32
    finish_reason: FinishReason
    text: str
    owner: int = -1  # this and the following as in `types.Response`
    observed: tuple[tuple[int, int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    grade: GradeResult | None = None


def _write_conversation(response: Generated) -> bytes:
    """Encode what only a conversation has, besides its observed ranges."""
    if not response.messages:
        return b""
    return json.dumps([response.messages, response.grade and vars(response.grade)]).encode()


def _read_texts(letters: np.ndarray | None, size: int) -> dict[str, Any]:
    """Decode a text of `size` bytes, and the conversation after it; None: on another rank."""
    data = b"" if letters is None else letters.tobytes()
    fields: dict[str, Any] = {"text": data[:size].decode()}
    if len(data) > size:
        messages, grade = json.loads(data[size:])
        fields |= {"messages": tuple(messages), "grade": grade and GradeResult(**grade)}
    return fields


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
    texts = [response.text.encode() for response in own]
    whole = [text + _write_conversation(r) for r, text in zip(own, texts, strict=True)]
    heads = [
        (*(r.position, _FINISH_REASONS.index(r.finish_reason), len(text), len(both)),
         *(len(getattr(r, name)) for name in TOKEN_COLUMNS))
        for r, text, both in zip(own, texts, whole, strict=True)
    ]  # fmt: skip
    numbers = np.array(heads, np.int64).reshape(-1, 4 + len(TOKEN_COLUMNS))
    pairs = gather_from_ranks((numbers, {r.position: r.observed for r in own if r.observed}))
    gathered = [each for each, _ in pairs]
    observed = {position: one for _, ranges in pairs for position, one in ranges.items()}
    ranks = np.repeat(np.arange(len(gathered)), [len(each) for each in gathered])
    order = np.argsort(np.concatenate(gathered)[:, 0], kind="stable")
    sources: list[int] = ranks[order].tolist()
    table = np.concatenate(gathered)[order].T.tolist()
    positions, reasons, text_sizes, whole_sizes, *sizes = table

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
    letters = Delivery(whole_sizes, sources, targets).send(
        [None if place is None else np.frombuffer(whole[place], np.uint8) for place in places],
        "uint8",
    )
    return [
        Generated(
            position=position,
            finish_reason=_FINISH_REASONS[reasons[index]],
            owner=-1 if everywhere else sources[index],
            observed=observed.get(position, ()),
            **_read_texts(letters[index], text_sizes[index]),
            **{name: rows[index] for name, rows in columns.items()},
        )
        for index, position in enumerate(positions)
    ]
