"""Tests of gathering responses: everywhere, or on rank 0 and where they were generated."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.data import token_rows
from megatron_rl.engine.requests import Generated, gather_responses
from megatron_rl.types import TOKEN_COLUMNS, GradeResult, RemoteRow
from tests.ranks import run_ranks


def _response(position: int, owner: int = -1) -> Generated:
    # Ragged lengths, an empty response, a text with characters of one to four bytes.
    count = position % 4
    one = Generated(
        position=position,
        token_ids=np.arange(count, dtype=np.int32) + 151_000 + position,
        rollout_logprobs=-0.5 * np.arange(position, position + count, dtype=np.float32),
        finish_reason="stop" if position % 2 else "length",
        text="aé→𝜋"[:count],
        owner=owner,
    )
    return replace(one, **_conversation(position)) if position > 6 else one


def _conversation(position: int) -> dict:
    """Two tokens were sampled; one or none more was observed."""
    return {
        "rollout_logprobs": np.array([-1.0, -2.0], np.float32),
        "mask_ids": np.arange(3 + position, dtype=np.int32),
        "mask_counts": np.array([2, 1 + position], np.int32),
        "routes": np.arange(5 * (position % 3), dtype=np.uint8),
        "observed": ((1, 1 + position % 2),),
        "restarts": (1,) * (position % 2),
        "messages": ({"role": "assistant", "content": "é"}, {"role": "tool", "content": "1"}),
        "grade": GradeResult(0.5, "scripted", None) if position % 2 else None,
    }


def _plain(response: Generated) -> dict:
    return {
        key: value.tolist()
        if isinstance(value, np.ndarray)
        else f"{len(value)} tokens"
        if isinstance(value, RemoteRow)
        else value
        for key, value in vars(response).items()
    }


PIECES = (4, 2**26)  # bytes: a row at a time, or all at once


def _gather(rank, world_size):
    # Rank 1 generated nothing, like the second rank of an engine.
    gathered = {}
    for on_all_ranks in (True, False):
        for token_rows.PIECE_BYTES in PIECES:
            for total in (9, 0):
                own = [_response(at) for at in range(total) if (0, 2)[at % 2] == rank]
                found = gather_responses(list(reversed(own)), on_all_ranks=on_all_ranks)
                gathered[on_all_ranks, token_rows.PIECE_BYTES, total] = list(map(_plain, found))
    return gathered


def _gather_for_owners(rank, world_size):
    own = [_response(at) for at in range(9) if (0, 2)[at % 2] == rank]
    found = gather_responses(own, on_all_ranks=False, owners={3: 1, 4: 0, 6: 1})
    return list(map(_plain, found))


def test_continued_responses_go_to_their_owners_and_stay_nowhere_else():
    owners = {3: 1, 4: 0, 6: 1}
    for rank, responses in enumerate(run_ranks(_gather_for_owners, 3)):
        for position, response in enumerate(responses):
            owner = owners.get(position, (0, 2)[position % 2])
            here = _plain(_response(position, owner))
            if rank != owner:  # no file contains routes, so rank 0 does not receive them
                here["routes"] = f"{len(here['routes'])} tokens"
            if rank not in (0, owner):
                for name in TOKEN_COLUMNS:
                    here[name] = f"{len(here[name])} tokens"
                here |= {"text": "", "messages": (), "grade": None}
            assert response == here


@pytest.fixture(scope="module")
def gathered():
    return run_ranks(_gather, 3)


@pytest.mark.parametrize("piece", PIECES)
def test_everywhere_every_rank_has_all_responses_in_order(gathered, piece):
    for of_rank in gathered:
        assert of_rank[True, piece, 9] == [_plain(_response(position)) for position in range(9)]
        assert of_rank[True, piece, 0] == []


@pytest.mark.parametrize("piece", PIECES)
def test_only_rank_0_and_owner_have_tokens_and_texts(gathered, piece):
    for rank, of_rank in enumerate(gathered):
        assert of_rank[False, piece, 0] == []
        for position, response in enumerate(of_rank[False, piece, 9]):
            owner = (0, 2)[position % 2]
            whole = _plain(_response(position, owner))
            if rank != owner:
                whole["routes"] = f"{len(whole['routes'])} tokens"
            if rank not in (0, owner):
                whole |= {name: f"{len(whole[name])} tokens" for name in TOKEN_COLUMNS}
                # the ranges are known everywhere
                whole |= {"text": "", "messages": (), "grade": None}
            assert response == whole
