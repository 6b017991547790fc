"""Sending of responses from the ranks that generated them to those that need them.

Every rank receives which responses there are, how long they are, which of their tokens were
observed and how they ended. Their columns (`types.TOKEN_COLUMNS`) and texts stay on the rank that
generated them and go to rank 0, which writes them; a response that continues one of another rank
goes there instead. Only where a call wants them everywhere, they go to every rank. Routes go to the
ranks that train them alone, since they are many bytes and no file contains them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.token_rows import WRITER, Delivery, is_local, remote_row
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.types import ROUTES, TOKEN_COLUMNS, FinishReason, GradeResult, no_ids

_FINISH_REASONS = get_args(FinishReason)
_COLUMNS = TOKEN_COLUMNS | ROUTES


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
    restarts: tuple[int, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    grade: GradeResult | None = None
    mask_ids: np.ndarray = field(default_factory=no_ids)
    mask_counts: np.ndarray = field(default_factory=no_ids)
    routes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    version: int = -1  # of the weights, if it is one window of a response


def _write_conversation(response: Generated) -> bytes:
    """Encode what only a conversation has, besides its observed ranges."""
    if not response.messages:
        return b""
    return json.dumps([response.messages, response.grade and vars(response.grade)]).encode()


def _read_texts(letters: np.ndarray, size: int) -> dict[str, Any]:
    """Decode a text of `size` bytes, and the conversation after it; nothing on another rank."""
    data = letters.tobytes() if is_local(letters) else b""
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


def gather_responses(
    own: Sequence[Generated], *, on_all_ranks: bool, owners: Mapping[int, int] | None = None
) -> list[Generated]:
    """Return all ranks' responses ordered by position; collective over all processes.

    on_all_ranks: with their columns and texts on every rank; else on their owner and on rank 0.
    owners: by position, the same on every rank; others belong to the rank that generated them.
    """
    own = sorted(own, key=lambda response: response.position)
    if dist.get_world_size() == 1:
        return list(own)
    texts = [(response.text.encode(), _write_conversation(response)) for response in own]
    heads, sources, observed = _exchange_heads(own, texts)
    positions, reasons, versions, text_sizes, whole_sizes, *sizes = heads
    owned = list(map((owners or {}).get, positions, sources))
    places = {response.position: place for place, response in enumerate(own)}

    def send(
        rows: Sequence[np.ndarray], lengths: Sequence[int], dtype: str, *, to_writer: bool = True
    ) -> list[np.ndarray]:
        some = [{one, WRITER} if to_writer else {one} for one in owned]
        targets = [range(dist.get_world_size())] * len(owned) if on_all_ranks else some
        mine = [rows[places[position]].astype(dtype) if position in places else None
                for position in positions]  # fmt: skip
        received = Delivery(lengths, sources, targets).send(mine, dtype)
        return [
            row if row is not None and dist.get_rank() in ranks else remote_row(length)
            for row, ranks, length in zip(received, targets, lengths, strict=True)
        ]

    columns: dict[str, Any] = {
        name: send(
            [getattr(response, name) for response in own],
            lengths,
            dtype,
            to_writer=name not in ROUTES,
        )
        for (name, dtype), lengths in zip(_COLUMNS.items(), sizes, strict=True)
    }
    letters = [np.frombuffer(text + conversation, np.uint8) for text, conversation in texts]
    letters = send(letters, whole_sizes, "uint8")
    return [
        Generated(
            position=position,
            finish_reason=_FINISH_REASONS[reasons[index]],
            owner=-1 if on_all_ranks else owned[index],
            version=versions[index],
            **observed.get(position, {}),
            **_read_texts(letters[index], text_sizes[index]),
            **{name: rows[index] for name, rows in columns.items()},
        )
        for index, position in enumerate(positions)
    ]


def _exchange_heads(
    own: Sequence[Generated], texts: Sequence[tuple[bytes, bytes]]
) -> tuple[list[list[int]], list[int], dict[int, dict[str, Any]]]:
    """Exchange the sizes of all ranks' responses.

    Returns lists over all responses, ordered by position: their positions, reasons, weight
    versions, bytes of their texts and of these with the conversations, and lengths of each column;
    then the rank of each; then the observed ranges and restarts by position.
    """
    rows = [
        (*(r.position, _FINISH_REASONS.index(r.finish_reason), r.version),
         *(len(text), len(text + conversation)),
         *(len(getattr(r, name)) for name in _COLUMNS))
        for r, (text, conversation) in zip(own, texts, strict=True)
    ]  # fmt: skip
    numbers = np.array(rows, np.int64).reshape(-1, 5 + len(_COLUMNS))
    ranges = {
        r.position: {"observed": r.observed, "restarts": r.restarts} for r in own if r.observed
    }
    pairs = gather_from_ranks((numbers, ranges))
    gathered = [each for each, _ in pairs]
    observed = {position: one for _, some in pairs for position, one in some.items()}
    ranks = np.repeat(np.arange(len(gathered)), [len(each) for each in gathered])
    order = np.argsort(np.concatenate(gathered)[:, 0], kind="stable")
    return np.concatenate(gathered)[order].T.tolist(), ranks[order].tolist(), observed
