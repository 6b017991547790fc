"""Tests of rollout batches whose tokens lie on their owners, against batches that are everywhere.

Four ranks, two replicas of two. Groups are packed, scored, packed again in another order as a queue
or a replay does, written by rank 0, read again, and packed once more.
"""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.data.token_rows import is_local, remote_row
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.rollouts.batch_metrics import batch_metrics
from megatron_rl.rollouts.rollout_batch import build_rollout_batch
from megatron_rl.rollouts.scoring import score_behavior, score_behavior_by_engine
from megatron_rl.runs.group_file import read_groups, write_groups
from megatron_rl.types import (
    ARRAY_NAMES,
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Response,
    Rollout,
)
from tests.ranks import run_ranks
from tests.unit.trainer.scripted import make_config

RANKS, GROUPS, SIZE = 4, 40, 4  # 40 groups are more rows than a file has in a block


class Policy:
    """Log-probs that name the token and its place."""

    def compute_logprobs_and_entropies(self, packs):
        values = [-(pack.labels + pack.position_ids / 64).float() for pack in packs]
        return [
            (value * pack.response_mask, value) for pack, value in zip(packs, values, strict=True)
        ]


def _group(place: int, *, rank: int, spread: bool) -> PromptGroup:
    rng = np.random.default_rng(place)
    prompt = Prompt(place, (), tuple(range(1, 4 + place % 3)), "", "toy")
    rollouts = []
    for sample in range(SIZE):
        owner, length = (place + sample) % RANKS, int(rng.integers(0, 30))
        tokens = rng.integers(0, 99, length, np.int32)
        logprobs = -rng.random(length, np.float32)
        here = not spread or rank in (0, owner)
        rollouts.append(
            Rollout(
                prompt,
                Response(
                    place, sample, tokens if here else remote_row(length),
                    logprobs if here else remote_row(length), "text" if here else "", "stop",
                    place % 2, owner=owner if spread else -1,
                    further={"advice": logprobs - sample if here else remote_row(length)},
                ),
                GradeResult(float(sample % 2), "equal", None),
            )
        )  # fmt: skip
    return PromptGroup(
        slot=PromptSlot(1, place), rollouts=tuple(rollouts),
        # The advantages of some groups are 0: they are in no pack.
        advantages=np.float32([1, -1, 1, -1]) * (place % 4 > 0),
        entropy=0.0, generated_at_step=1, updates=0,
    )  # fmt: skip


def _life(rank: int, folder: Path, *, spread: bool) -> list:
    topology = Topology(
        world_size=RANKS, rank=rank, tp_size=2, tp_rank=rank // 2, dp_size=2, dp_rank=rank % 2,
        dp_group=_group_of(rank),
    )  # fmt: skip
    config = make_config(minibatches=2, tokens_per_micro_batch=512)
    objective = build_objective("pnpo")

    def pack(groups):
        return build_rollout_batch(groups, config=config, objective=objective, topology=topology)

    groups = [_group(place, rank=rank, spread=spread) for place in range(GROUPS)]
    batch = pack(groups)
    batch = score_behavior(batch, Policy())
    later = pack(batch.groups[::-1]).by_lag(3)
    file = folder / f"{spread}.parquet"
    if rank == 0:
        write_groups(file, batch.groups)
    dist.barrier()
    # As after a restart: the owners are others.
    resumed = read_groups(file, rank=rank, world_size=RANKS if spread else 1)
    again = score_behavior_by_engine(pack(resumed[1:] + resumed[:1]))
    third = pack(again.groups)
    return [_plain(one) for one in (batch, later, again, third)] + [
        _kept(batch.groups), _kept(resumed), batch_metrics(batch) if rank == 0 else None
    ]  # fmt: skip


def _group_of(rank: int):
    """The data-parallel group: ranks 0 and 1 have the first tensor shard, 2 and 3 the second."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


def _plain(batch) -> list:
    return [
        {
            name: value.tolist()
            if isinstance(value, torch.Tensor)
            else {key: each.tolist() for key, each in value.items()}
            if name == "further"
            else value
            for name, value in vars(pack).items()
        }
        for pack in batch.packs
    ]


def _kept(groups) -> int:
    """Values of tokens that this rank keeps with its groups."""
    rows = [
        row
        for group in groups
        for rollout in group.rollouts
        for row in (rollout.response.row(name) for name in (*ARRAY_NAMES, "advice"))
    ]
    return sum(len(row) for row in rows if is_local(row))


def _both(rank, world_size, folder):
    whole = _life(rank, Path(folder), spread=False)
    received = 0
    send = dist.all_to_all_single

    def counting(output, sent, *splits):
        nonlocal received
        received += output.nbytes
        send(output, sent, *splits)

    dist.all_to_all_single = counting
    spread = _life(rank, Path(folder), spread=True)
    return whole, spread, received


def test_packs_are_bit_identical_for_any_token_placement(tmp_path):
    results = run_ranks(_both, RANKS, str(tmp_path))
    for rank, (whole, spread, received) in enumerate(results):
        assert spread[:4] == whole[:4]
        assert any(pack["behavior_logprobs"] for pack in spread[1])
        assert all(pack["further"]["advice"] for each in spread[:4] for pack in each)
        assert any(pack["classes"] for pack in spread[1])  # of two weight versions
        everything = whole[4]
        if rank == 0:
            assert spread[4:6] == whole[4:6]  # it writes all of them
            assert spread[6] == whole[6]
        else:
            assert 0.15 * everything < spread[4] < 0.35 * everything  # a quarter
            assert 0.15 * everything < spread[5] < 0.35 * everything
            # Four batches were packed, each half of it here; three to four columns of 4 bytes.
            assert 0 < received < 5 * 4 * 0.6 * everything
    # Replicas train different rollouts, and all of them together.
    indices = [
        {i for pack in spread[0] for i in pack["rollout_indices"]} for _, spread, _ in results
    ]
    assert indices[0] == indices[2] and indices[1] == indices[3]
    assert (
        len((indices[0] | indices[1]) - {-1})
        == sum(place % 4 > 0 for place in range(GROUPS)) * SIZE
    )
