"""Tests of gathering responses: everywhere, or on rank 0 and where they were generated."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.columns import ARRAYS
from megatron_rl.data import token_rows
from megatron_rl.data.token_rows import share_responses
from megatron_rl.types import GradeResult, RemoteRow, Response
from tests.ranks import run_ranks


def _response(position: int, owner: int = -1) -> Response:
    # Ragged lengths, an empty response, a text with characters of one to four bytes.
    count = position % 4
    one = Response(
        prompt_index=position,
        sample_index=0,
        weight_version=3,
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
        # as after a restart, and a value that the package does not know
        "behavior_logprobs": np.array([-1.5], np.float32) if position % 2 else None,
        "further": {"advice": np.array([0.5, position], np.float32)},
        "routes": np.arange(5 * (position % 3), dtype=np.uint8),
        "observed": ((1, 1 + position % 2),),
        "restarts": (1,) * (position % 2),
        "messages": ({"role": "assistant", "content": "é"}, {"role": "tool", "content": "1"}),
        "grade": GradeResult(0.5, "scripted", None) if position % 2 else None,
    }


def _plain(response: Response) -> dict:
    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return f"{len(value)} tokens" if isinstance(value, RemoteRow) else value

    return {key: plain(value) for key, value in vars(response).items()}


def _all(found: dict[int, Response]) -> list[dict]:
    return list(map(_plain, found.values()))


OWNERS = {3: 1, 4: 0, 6: 1}  # of responses that are continued
PIECES = (4, 2**26)  # bytes: a row at a time, or all at once


def _gather(rank, world_size):
    # Rank 1 generated nothing, like the second rank of an engine.
    gathered = {}
    for on_all_ranks in (True, False):
        for token_rows.PIECE_BYTES in PIECES:
            for total in (9, 0):
                own = [at for at in reversed(range(total)) if (0, 2)[at % 2] == rank]
                found = share_responses(
                    {at: _response(at) for at in own}, on_all_ranks=on_all_ranks
                )
                assert list(found) == list(range(total))
                gathered[on_all_ranks, token_rows.PIECE_BYTES, total] = _all(found)
    own = {at: _response(at) for at in range(9) if (0, 2)[at % 2] == rank}
    gathered[False, "continued", 9] = _all(share_responses(own, owners=OWNERS))
    return gathered


@pytest.fixture(scope="module")
def gathered():
    return run_ranks(_gather, 3)


def test_everywhere_every_rank_has_all_responses_in_order(gathered):
    for of_rank in gathered:
        for piece in PIECES:
            assert of_rank[True, piece, 9] == [_plain(_response(place)) for place in range(9)]
            assert of_rank[True, piece, 0] == []


def test_only_rank_0_and_owner_have_tokens_and_texts(gathered):
    """The owner is the rank that generated a response, or the one that continues it."""
    for rank, of_rank in enumerate(gathered):
        assert of_rank[False, PIECES[0], 0] == []
        for piece, owners in (*((piece, {}) for piece in PIECES), ("continued", OWNERS)):
            for position, response in enumerate(of_rank[False, piece, 9]):
                owner = owners.get(position, (0, 2)[position % 2])
                whole = _plain(_response(position, owner))
                # No file contains routes, so rank 0 does not receive them; ranges are everywhere.
                remote = [one.name for one in ARRAYS if rank not in ((0, owner) if one.at_writer
                          else (owner,)) and whole[one.name] is not None]  # fmt: skip
                whole |= {name: f"{len(whole[name])} tokens" for name in remote}
                if rank not in (0, owner):
                    whole |= {"text": "", "messages": (), "grade": None}
                    whole["further"] = {name: f"{len(row)} tokens"
                                        for name, row in whole["further"].items()}  # fmt: skip
                assert response == whole
