"""Tests of rows that travel between ranks: who receives what, and how many bytes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.data import token_rows
from megatron_rl.data.packing import gather_by_rollout
from megatron_rl.data.token_rows import Delivery, find_targets, is_local, remote_row
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.types import TokenBatch
from tests.ranks import run_ranks

RANKS, ROWS, PIECE = 4, 40, 200
OWNERS = [(0, 2, 3, 3)[i % 4] for i in range(ROWS)]
SIZES = [(0, 1, 7, 30, 60)[i % 5] for i in range(ROWS)]  # 60 values of 4 bytes exceed a piece
NEEDED = [[i for i in range(ROWS) if (i + rank) % 3 == 0] for rank in range(RANKS)]


def _row(index: int) -> np.ndarray:
    return np.arange(SIZES[index], dtype=np.float32) + 100 * index


def _have(rank: int) -> list:
    """Rank 0 has every row, another one its own."""
    return [
        _row(i) if rank in (0, owner) else remote_row(SIZES[i]) for i, owner in enumerate(OWNERS)
    ]


def _count_traffic():
    """Count bytes received in all, and the most that one collective sends or receives."""
    counts, send = {"received": 0, "most": 0}, dist.all_to_all_single

    def counting(received, sent, *splits):
        counts["received"] += received.nbytes
        counts["most"] = max(counts["most"], received.nbytes, sent.nbytes)
        send(received, sent, *splits)

    dist.all_to_all_single = counting
    return counts


def _deliver(rank, world_size):
    token_rows.PIECE_BYTES = PIECE
    counts = _count_traffic()
    delivery = Delivery(SIZES, OWNERS, find_targets(gather_from_ranks(NEEDED[rank]), owners=OWNERS))
    brought = delivery.send(_have(rank), "float32")
    return [row.tolist() if is_local(row) else len(row) for row in brought], dict(counts)


def test_rank_receives_only_rows_it_needs():
    results = run_ranks(_deliver, RANKS)
    for rank, (rows, counts) in enumerate(results):
        for index, row in enumerate(rows):
            has = index in NEEDED[rank] or rank in (0, OWNERS[index])
            assert row == (_row(index).tolist() if has else SIZES[index])
        new = [i for i in NEEDED[rank] if rank not in (0, OWNERS[i])]
        assert counts["received"] == 4 * sum(SIZES[i] for i in new)
        # A row of 60 values goes alone, from its owner to at most three other ranks.
        assert counts["most"] <= max(PIECE, 4 * 60 * (RANKS - 1))
    assert sum(counts["received"] for _, counts in results) > 0


def test_pieces_are_cut_where_rank_would_send_or_receive_too_much(monkeypatch):
    delivery = Delivery([3, 3, 3, 3], [1, 1, 2, 2], [(0,), (0,), (0,), (3,)])
    assert list(delivery._pieces(6)) == [[0, 1], [2, 3]]  # rank 0 receives 3 + 3, then 3
    assert list(delivery._pieces(9)) == [[0, 1, 2, 3]]
    to_two = Delivery([3, 3, 3], [1, 1, 1], [(0, 2), (), (3, 1)])
    assert list(to_two._pieces(6)) == [[0], [2]]  # rank 1 sends 6, then 3
    assert list(to_two._pieces(1)) == [[0], [2]]


def test_values_of_other_ranks_have_only_length():
    row = remote_row(3)
    assert len(row) == 3
    assert not is_local(row)
    with pytest.raises(AssertionError, match="3 tokens are on another rank"):
        np.concatenate([row, np.zeros(2)])
    with pytest.raises(TypeError):
        row[0]


def _pack(indices: list[int]) -> TokenBatch:
    """Sequences of 8 positions, of which the last `index` belong to the response."""
    mask = torch.cat([torch.arange(8) >= 8 - max(index, 0) for index in indices])
    nothing = torch.zeros(len(mask), dtype=torch.int64)
    return TokenBatch(
        tokens=nothing, position_ids=nothing, labels=nothing, response_mask=mask,
        lengths=(8,) * len(indices), rollout_indices=tuple(indices),
        advantages=torch.zeros(len(indices)), rollout_logprobs=None,
    )  # fmt: skip


def _gather_rollouts(rank, world_size):
    """Two replicas of two ranks; rollout 4 is in no pack, and -1 is a filler."""
    replica = rank % 2
    packs = [_pack([[1, 3], [2, 5]][replica]), _pack([[-1], [6]][replica])]
    values = [torch.arange(len(pack.tokens)) + 10.0 * pack.rollout_indices[0] for pack in packs]
    topology = Topology(world_size=4, rank=rank, tp_size=2, dp_size=2, dp_rank=replica)
    found = []
    for owners in (None, [3, 2, 0, 1, 1, 3, 2]):
        rows = gather_by_rollout(packs, values, count=7, topology=topology, owners=owners)
        found.append([row if row is None or is_local(row) else len(row) for row in rows])
    return found


def test_values_of_packs_come_back_to_owners_and_writer():
    expected = {
        1: [17.0], 3: [23.0, 24.0, 25.0],  # the ends of the first and second 8, plus 10 * 1
        2: [26.0, 27.0], 5: [31.0, 32.0, 33.0, 34.0, 35.0],
        6: [62.0, 63.0, 64.0, 65.0, 66.0, 67.0],
    }  # fmt: skip
    for rank, (everywhere, owned) in enumerate(run_ranks(_gather_rollouts, 4)):
        for index in range(7):
            if index not in expected:
                assert everywhere[index] is None
                assert owned[index] is None
                continue
            assert everywhere[index].tolist() == expected[index]
            if rank in (0, [3, 2, 0, 1, 1, 3, 2][index]):
                assert owned[index].tolist() == expected[index]
            else:
                assert owned[index] == index
