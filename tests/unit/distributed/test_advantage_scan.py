"""Generalized advantages against their definition as a loop; four_ranks.py covers several ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.distributed import advantage_scan
from megatron_rl.distributed.advantage_scan import generalized_advantages
from megatron_rl.distributed.sequence_layout import SequenceLayout
from tests.unit.distributed.four_ranks import all_results

PACKS = {  # multiples of 2 cp for each size: one with sequences of a decision, one with joined ones
    "packed": ((24, 48, 24, 240), ()),
    "joined": ((24, 72, 24, 48), (3, 1)),
}


def advantages_by_loop(decisions, values, rewards, gamma, lam):
    """Compute A_t of one response over its decisions (indices), from the last to the first."""
    advantages, after, next_value = {}, 0.0, 0.0
    for t in reversed(decisions):
        delta = rewards[t] + gamma[t] * next_value - values[t]
        after = advantages[t] = delta + gamma[t] * lam[t] * after
        next_value = values[t]
    return advantages


def random_case(lengths, joined=(), *, seed=0, decisions=0.6):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < decisions
    values, rewards, gamma, first, second = torch.randn(5, total, generator=generator).double()
    inputs = (values, rewards, *(x.sigmoid() for x in (gamma, first, second)))
    return SequenceLayout(lengths, mask, joined=joined), inputs


def expected(layout, inputs, lam):
    values, rewards, gamma = inputs[:3]
    result = torch.zeros_like(values)
    for response in range(len(layout.joined or layout.lengths)):
        own = layout.full_mask & (layout.response_ids == response)
        found = advantages_by_loop(own.nonzero().squeeze(1).tolist(), values, rewards, gamma, lam)
        for t, value in found.items():
            result[t] = value
    return result


@pytest.mark.parametrize(
    ("lengths", "joined"),
    [((7,), ()), ((1, 1, 5), ()), ((40, 3, 200, 1), ()), ((5, 6, 7, 8), (3, 1)), ((9, 4), (2,))],
)
def test_advantages_equal_the_loop(lengths, joined):
    layout, inputs = random_case(lengths, joined)
    values, rewards, gamma, *lambdas = inputs
    found = generalized_advantages(layout, values, rewards, gamma=gamma, lambdas=lambdas)
    for one, lam in zip(found, lambdas, strict=True):
        torch.testing.assert_close(one, expected(layout, inputs, lam), atol=1e-14, rtol=1e-13)


def test_values_of_tokens_that_are_no_decisions_are_not_read():
    layout, inputs = random_case((12, 6))
    values, rewards, gamma, lam, _ = inputs
    found = generalized_advantages(layout, values, rewards, gamma=gamma, lambdas=[lam])
    bad = [torch.where(layout.mask, x, torch.nan) for x in (values, rewards, gamma, lam)]
    again = generalized_advantages(layout, bad[0], bad[1], gamma=bad[2], lambdas=[bad[3]])
    assert torch.equal(found[0], again[0])


def test_lambda_of_one_is_the_return_minus_the_value():
    # gamma = lambda = 1: all values but the token's own cancel.
    layout = SequenceLayout((4,), torch.tensor([1, 0, 1, 1]).bool())
    values = torch.tensor([10.0, 99.0, 20.0, 30.0])
    rewards = torch.tensor([1.0, 99.0, 2.0, 4.0])
    ones = torch.ones(4)
    (found,) = generalized_advantages(layout, values, rewards, gamma=ones, lambdas=[ones])
    assert found.tolist() == [7 - 10, 0, 6 - 20, 4 - 30]


def test_lambda_of_zero_is_the_one_step_error():
    layout = SequenceLayout((3,), torch.ones(3).bool())
    values, rewards = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 0.0, 8.0])
    half, zeros = torch.full((3,), 0.5), torch.zeros(3)
    (found,) = generalized_advantages(layout, values, rewards, gamma=half, lambdas=[zeros])
    assert found.tolist() == [0.5 * 2 - 1, 0.5 * 4 - 2, 8 - 4]


def on_rank(rank, world_size):
    """Return the advantages of whole packs at every context-parallel size, and what was sent."""
    results, sent = {}, []
    gather = advantage_scan.gather_stacked
    advantage_scan.gather_stacked = lambda x, *, group: (
        sent.append(tuple(x.shape)) or gather(x, group=group)
    )
    for cp_size in (2, 3, 4):
        groups = [
            dist.new_group(list(range(start, start + cp_size)))
            for start in range(0, world_size - cp_size + 1, cp_size)
        ]
        if rank >= len(groups) * cp_size:
            continue
        for name, (lengths, joined) in PACKS.items():
            whole, inputs = random_case(lengths, joined, seed=3, decisions=0.1)
            layout = SequenceLayout(
                lengths, whole.full_mask, joined=joined,
                cp_rank=rank % cp_size, cp_size=cp_size, cp_group=groups[rank // cp_size],
            )  # fmt: skip
            values, rewards, gamma, *lambdas = (layout.shard(x) for x in inputs)
            found = generalized_advantages(layout, values, rewards, gamma=gamma, lambdas=lambdas)
            results[name, cp_size] = [layout.gather(one).tolist() for one in found]
    advantage_scan.gather_stacked = gather
    return results, sent


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("name", PACKS)
def test_advantages_are_independent_of_context_parallelism(name, cp_size):
    lengths, joined = PACKS[name]
    layout, inputs = random_case(lengths, joined, seed=3, decisions=0.1)
    assert (layout.mask.sum() > 8) and not layout.mask.all()
    wanted = [expected(layout, inputs, lam) for lam in inputs[3:]]
    ranks = [found for result in all_results() if (found := result["advantages"][0])]
    found = [rank[name, cp_size] for rank in ranks if (name, cp_size) in rank]
    assert len(found) == {2: 4, 3: 3, 4: 4}[cp_size]
    for rank in found:
        for one, other in zip(rank, wanted, strict=True):
            torch.testing.assert_close(
                torch.tensor(one, dtype=torch.float64), other, atol=1e-14, rtol=1e-13
            )


def test_a_pass_sends_one_table_of_chunks_whatever_the_length():
    # 2 numbers for the next value and 3 for each of two lambdas, for 2 chunks of 4 sequences.
    for result in all_results():
        assert set(result["advantages"][1]) == {(4, 2, 8)}
