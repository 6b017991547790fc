"""Responses survive the trip as flat arrays, in the order of the call, on every rank."""

import numpy as np
import torch

from megatron_rl.rollout.response_gather import Generated, gather_responses
from tests.ranks import run_ranks


def _response(place: int) -> Generated:
    # Ragged lengths, an empty response, a text with characters of one to four bytes.
    count = place % 4
    return Generated(
        place=place,
        token_ids=np.arange(count, dtype=np.int32) + 151_000 + place,
        logprobs=-0.5 * np.arange(place, place + count, dtype=np.float32),
        finish_reason="stop" if place % 2 else "length",
        text="aé→𝜋"[:count],
    )


def _gather(rank, world_size):
    # Rank 1 generated nothing, as the second rank of an engine does.
    gathered = []
    for total in (9, 0):
        own = [_response(place) for place in range(total) if (0, 2)[place % 2] == rank]
        gathered.append(gather_responses(list(reversed(own)), device=torch.device("cpu")))
    return [[_plain(response) for response in responses] for responses in gathered]


def _plain(response: Generated) -> dict:
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in vars(response).items()
    }


def test_all_ranks_get_all_responses_in_order():
    for nine, none in run_ranks(_gather, 3):
        assert nine == [_plain(_response(place)) for place in range(9)]
        assert none == []
