"""Test of gathering responses as flat arrays on every rank, in the order of the call."""

import numpy as np
import torch

from megatron_rl.engine.response_gather import Generated, gather_responses
from tests.ranks import run_ranks


def _response(position: int) -> Generated:
    # Ragged lengths, an empty response, a text with characters of one to four bytes.
    count = position % 4
    return Generated(
        position=position,
        token_ids=np.arange(count, dtype=np.int32) + 151_000 + position,
        logprobs=-0.5 * np.arange(position, position + count, dtype=np.float32),
        finish_reason="stop" if position % 2 else "length",
        text="aé→𝜋"[:count],
    )


def _gather(rank, world_size):
    # Rank 1 generated nothing, like the second rank of an engine.
    gathered = []
    for total in (9, 0):
        own = [_response(position) for position in range(total) if (0, 2)[position % 2] == rank]
        gathered.append(gather_responses(list(reversed(own)), device=torch.device("cpu")))
    return [[_plain(response) for response in responses] for responses in gathered]


def _plain(response: Generated) -> dict:
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in vars(response).items()
    }


def test_gather_responses_returns_all_in_order_on_every_rank():
    for nine, none in run_ranks(_gather, 3):
        assert nine == [_plain(_response(position)) for position in range(9)]
        assert none == []
