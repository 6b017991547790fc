"""Gathering of all responses on every rank, as flat arrays instead of one object per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.types import FinishReason

_FINISH_REASONS = get_args(FinishReason)


@dataclass(frozen=True, eq=False)
class Generated:
    """One response as its engine generated it."""

    position: int  # among all responses of the call
    token_ids: np.ndarray  # [L] int32
    logprobs: np.ndarray  # [L] float32
    finish_reason: FinishReason
    text: str


def _pack(responses: Sequence[Generated]) -> bytes:
    texts = [response.text.encode() for response in responses]
    header = [
        (r.position, len(r.token_ids), _FINISH_REASONS.index(r.finish_reason), len(text))
        for r, text in zip(responses, texts, strict=True)
    ]
    parts: list[np.ndarray] = [
        np.array([len(responses)], np.int64),
        np.array(header, np.int64).reshape(-1),
        *(response.token_ids.astype(np.int32) for response in responses),
        *(response.logprobs.astype(np.float32) for response in responses),
    ]
    return b"".join([part.tobytes() for part in parts] + texts)


def _unpack(data: bytes) -> list[Generated]:
    count = int(np.frombuffer(data, np.int64, 1)[0])
    header = np.frombuffer(data, np.int64, 4 * count, 8).reshape(count, 4)
    total = int(header[:, 1].sum())
    offset = 8 + 32 * count
    tokens = np.frombuffer(data, np.int32, total, offset)
    logprobs = np.frombuffer(data, np.float32, total, offset + 4 * total)
    text_offset, token_offset, responses = offset + 8 * total, 0, []
    for position, length, reason, text_length in header.tolist():
        span = slice(token_offset, token_offset + length)
        responses.append(
            Generated(
                position=position,
                token_ids=tokens[span],
                logprobs=logprobs[span],
                finish_reason=_FINISH_REASONS[reason],
                text=data[text_offset : text_offset + text_length].decode(),
            )
        )
        token_offset += length
        text_offset += text_length
    return responses


def gather_seconds(own: float, *, device: torch.device) -> list[float]:
    """Gather every rank's seconds; collective over all processes."""
    seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    seconds[dist.get_rank()] = own
    if dist.get_world_size() > 1:
        dist.all_reduce(seconds)
    return seconds.tolist()


def gather_responses(own: Sequence[Generated], *, device: torch.device) -> list[Generated]:
    """Gather all ranks' responses ordered by position; collective over all processes."""
    if dist.get_world_size() == 1:
        return sorted(own, key=lambda response: response.position)
    packed = torch.frombuffer(bytearray(_pack(own)), dtype=torch.uint8).to(device)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = packed.numel()
    dist.all_reduce(sizes)
    padded = packed.new_zeros(int(sizes.max()))
    padded[: packed.numel()] = packed
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    responses = [
        response
        for data, size in zip(gathered, sizes.tolist(), strict=True)
        for response in _unpack(data[:size].cpu().numpy().tobytes())
    ]
    return sorted(responses, key=lambda response: response.position)
