"""Conversations: the environment cancels in every ratio, and counts nowhere.

Exact gradients by enumeration of every conversation of a small task, all named objectives against
double loops over the sampled tokens alone, under context parallelism too, and the mistakes that
each of these must catch.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.data import packing
from megatron_rl.data.packing import FILLER, plan_minibatches, scatter_to_packs
from megatron_rl.data.sharing import Sharing
from megatron_rl.distributed import chunk_scan
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.types import (
    GradeResult,
    Prompt,
    PromptGroup,
    PromptSlot,
    Response,
    Rollout,
    sampled_ranges,
)
from tests.unit.distributed.four_ranks import all_results
from tests.unit.objectives import naive
from tests.unit.objectives.conversation_tree import SHORT_TURNS, TURNS, ConversationTree
from tests.unit.objectives.mutate import mutated
from tests.unit.objectives.response_tree import weight_alone

DRIFT = 0.7
OBSERVED_FROM = 100  # tokens of observations; those of the policy are below


def exact_gradients(tree):
    """The estimators that are exact in expectation, relative to grad J; by name."""
    policy, behavior = tree.base + DRIFT * tree.direction, tree.base
    truth = tree.true_gradient(policy)
    outcome = (tree.rewards - 0.3)[tree.of]
    cases = {
        "C_t A^theta z_t": (build_objective("exact_token_score"), tree.advantages(policy)),
        "C_t A^beta sum z": (build_objective("exact_prefix_score"), tree.advantages(behavior)),
        "C_L (R - b) sum z": (weight_alone("sequence_product"), outcome),
    }
    gaps = {}
    for name, (objective, advantages) in cases.items():
        found = tree.expected_gradient(
            objective, policy=policy, behavior=behavior, advantages=advantages
        )
        gaps[name] = float((found - truth).norm() / truth.norm())
    return gaps


@pytest.mark.parametrize(("turns", "choices"), [(2, TURNS), (3, SHORT_TURNS)])
def test_gradients_over_all_conversations_are_exact(turns, choices):
    tree = ConversationTree(turns=turns, seed=0, choices=choices)
    assert len(tree.tokens) == 2 * len(choices) ** turns * 3 ** (turns - 1)
    assert float(tree.probabilities(tree.base).sum()) == pytest.approx(1)
    assert max(exact_gradients(tree).values()) < 1e-10


def conversations(seed, *, groups=3, samples=4):
    """Rollouts of one to five turns with 0 to 30 observed tokens between them, and their drifts."""
    draw = np.random.default_rng(seed)
    rollouts, drifts = [], []
    for group in range(groups):
        tokens = tuple(draw.integers(3, 90, draw.integers(1, 12)).tolist())
        prompt = Prompt(group, (), tokens, "", "")
        for sample in range(samples):
            token_ids, observed = [], []
            for turn in range(draw.integers(1, 6)):
                if turn:
                    size = int(draw.integers(0, 31))
                    observed.append((len(token_ids), len(token_ids) + size))
                    token_ids += draw.integers(OBSERVED_FROM, 200, size).tolist()
                token_ids += draw.integers(3, 90, draw.integers(1, 10)).tolist()
            length = len(token_ids) - sum(end - first for first, end in observed)
            response = Response(
                group, sample, np.array(token_ids, np.int32),
                -draw.exponential(1.0, length).astype(np.float32), "", "stop", 0,
                observed=tuple(observed),
            )  # fmt: skip
            rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
            drift = draw.normal(0, 2e-3, length) + draw.normal(0, 1e-3)
            drifts.append(drift.astype(np.float32))
    advantages = draw.normal(size=len(rollouts)).astype(np.float32)
    return rollouts, drifts, advantages


def split(rollouts, seed, *, keeps=False):
    """The same conversations, whose observations often replace everything before them.

    keeps: the new history begins with a part of the one before, sampled tokens too.
    """
    draw = np.random.default_rng(seed)
    changed = []
    for rollout in rollouts:
        old, token_ids, observed, restarts = rollout.response, [], [], []
        ranges = sampled_ranges(old.observed, len(old.token_ids))
        for turn, (first, end) in enumerate(ranges):
            if turn:
                begin, (before, after) = len(token_ids), old.observed[turn - 1]
                token_ids += old.token_ids[before:after].tolist()
                if draw.random() < 0.6:
                    restarts.append(begin)
                    if keeps:
                        previous = [0, *restarts][-2]
                        before = rollout.prompt.token_ids if previous == 0 else ()
                        history = [*before, *token_ids[previous:begin]]
                        token_ids[begin:begin] = history[: draw.integers(0, len(history) + 1)]
                    token_ids += draw.integers(OBSERVED_FROM, 200, draw.integers(1, 40)).tolist()
                observed.append((begin, len(token_ids)))
            token_ids += old.token_ids[first:end].tolist()
        response = replace(
            old, token_ids=np.array(token_ids, np.int32), observed=tuple(observed),
            restarts=tuple(restarts),
        )  # fmt: skip
        changed.append(replace(rollout, response=response))
    assert max(len(one.response.restarts) for one in changed) > 1
    assert min(len(one.response.restarts) for one in changed) == 0
    return changed


def turn_advantage(advantage, turn):
    """A different advantage, also of the other sign, for each turn."""
    return np.float32(float(advantage) * (-0.7) ** turn)


def per_token(rollouts, advantages, *, by_turn):
    """The advantage of each sampled token of each response, those of turns drawn from its own."""
    rows = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        response, owner = rollout.response, []
        for place in range(
            len(response.token_ids)
        ):  # the turn is the number of observations before
            if not any(first <= place < end for first, end in response.observed):
                owner.append(sum(end <= place for _, end in response.observed))
        rows.append(np.array([turn_advantage(advantage, turn * by_turn) for turn in owner]))
    return rows


def run(
    seed, topology, *, by_turn=False, is_split=False, is_shared=False, names=tuple(naive.NAMED)
):
    """Loss and gradients [sum of L] of these objectives for this rank's part of a minibatch.

    The packs are those of the package; the model's log-probs on observations are nan.
    """
    rollouts, drifts, advantages = conversations(seed)
    rollouts = split(rollouts, seed, keeps=is_shared) if is_split else rollouts
    (minibatch,) = plan_minibatches(
        rollouts, torch.from_numpy(advantages), minibatches=1, tokens_per_micro_batch=160,
        topology=topology, sharing=Sharing(1.0, always=True) if is_shared else None,
    )  # fmt: skip
    packs = minibatch.micro_batches
    if is_shared:
        check_sharing(packs, is_split=is_split)
    if by_turn:
        turns = [
            np.array([turn_advantage(a, turn) for turn in range(one.response.turns)])
            for one, a in zip(rollouts, advantages, strict=True)
        ]
        group = PromptGroup(
            PromptSlot(1, 0), tuple(rollouts), advantages, (None,) * len(rollouts), 0.0, 1, 0,
            turn_advantages=tuple(turns),
        )  # fmt: skip
        batch = RolloutBatch([group], [True] * len(rollouts), [minibatch], topology)
        packs = batch.with_turn_advantages().packs
    engine = [np.asarray(one.response.rollout_logprobs) for one in rollouts]
    behavior = scatter_to_packs(packs, engine)
    policy = scatter_to_packs(packs, [e + d for e, d in zip(engine, drifts, strict=True)])
    check_packs(packs, behavior)
    flat = [torch.from_numpy(np.concatenate(rows).astype(np.float64)) for rows in (
        [(e + d).astype(np.float64) - e for e, d in zip(engine, drifts, strict=True)],
        per_token(rollouts, advantages, by_turn=by_turn),
        engine,
    )]  # fmt: skip
    starts = np.cumsum([0, *map(len, engine)])
    totals = {}
    for name in names:
        objective = build_objective(name).resolve(MinibatchTokens.whole(*flat))
        total = torch.zeros(1 + starts[-1], dtype=torch.float64)
        for pack, b, p in zip(packs, behavior, policy, strict=True):
            layout = SequenceLayout(
                pack.sequence_lengths, pack.response_mask, joined=pack.joined,
                parents=pack.parents, used=pack.used, cp_rank=topology.cp_rank,
                cp_size=topology.cp_size, cp_group=topology.cp_group,
            )  # fmt: skip
            nan = torch.full_like(p, math.nan).double()
            x = layout.shard(torch.where(pack.response_mask, p.double(), nan)).requires_grad_()
            before = layout.shard(b.double())
            result = objective(
                TokenInputs(x, before, layout.shard(pack.advantages_per_token().double()), before),
                layout=layout,
                denominators=minibatch.denominators,
            )
            result.loss.sum().backward()
            total[0] += result.loss.detach().sum()
            gradient = layout.gather(x.grad) / topology.cp_size
            parts = zip(
                pack.rollout_indices, gradient.split(list(pack.lengths)),
                pack.response_mask.split(list(pack.lengths)), strict=True,
            )  # fmt: skip
            for index, part, mask in parts:
                if index >= 0:
                    where = slice(1 + starts[index], 1 + starts[index + 1])
                    total[where] = part[mask]
        totals[name] = total
    return totals


def check_sharing(packs, *, is_split):
    """Some prompts are fillers, and some sampled tokens are kept by a later sequence."""
    assert any(FILLER in pack.rollout_indices and pack.parents for pack in packs)
    owned = [
        pack.response_mask.split(list(pack.sequence_lengths))[parent].any()
        for pack in packs
        for parent in pack.parents
        if parent >= 0
    ]
    assert any(owned) == is_split and not all(owned)


def check_packs(packs, behavior):
    """Each label on the mask is a token of the policy, with its own log-prob."""
    for pack, logprobs in zip(packs, behavior, strict=True):
        assert (pack.labels[pack.response_mask] < OBSERVED_FROM).all()
        assert torch.equal(logprobs, pack.rollout_logprobs)
        assert not logprobs[~pack.response_mask].any()
    assert any((pack.labels[~pack.response_mask] >= OBSERVED_FROM).any() for pack in packs)


@functools.cache
def expected(seed, *, by_turn=False):
    """The same of every objective by double loops over the sampled tokens alone."""
    rollouts, drifts, advantages = conversations(seed)
    advantages = per_token(rollouts, advantages, by_turn=by_turn)
    responses = []
    for rollout, drift, advantage in zip(rollouts, drifts, advantages, strict=True):
        engine = np.asarray(rollout.response.rollout_logprobs)
        now = (engine + drift).astype(np.float64)
        responses.append({
            "log_ratios": (now - engine).tolist(), "logprobs": now.tolist(),
            "advantages": advantage.tolist(), "gaps": [0.0] * len(engine),
        })  # fmt: skip
    results = {}
    for name, spec in naive.NAMED.items():
        loss, gradients, _ = naive.evaluate(spec, responses)
        results[name] = [loss, *(value for row in gradients for value in row)]
    return results


def assert_same(totals, wanted):
    for name, values in totals.items():
        np.testing.assert_allclose(values, wanted[name], rtol=1e-9, atol=1e-13, err_msg=name)


SCANS = ("pnpo", "gspo", "minpro", "vaco", "cppo", "opsm")  # one of each kind


@functools.cache
def conversations_of_two_turns():
    return ConversationTree(turns=2, seed=1)


def assert_correct(names=SCANS):
    """Checks that a correct package passes, and that fail under every mistake below."""
    assert_same(run(1, Topology.single(), names=names), expected(1))
    assert_same(run(1, Topology.single(), is_split=True, names=names), expected(1))
    totals = run(1, Topology.single(), is_split=True, is_shared=True, names=names)
    assert_same(totals, expected(1))
    assert max(exact_gradients(conversations_of_two_turns()).values()) < 1e-10


def test_objectives_equal_loops_over_sampled_tokens():
    assert_correct(tuple(naive.NAMED))


def test_positions_start_again_in_each_sequence_of_a_split_conversation():
    rollouts = split(conversations(5)[0], 5)
    (minibatch,) = plan_minibatches(
        rollouts, torch.zeros(len(rollouts)), minibatches=1, tokens_per_micro_batch=10**6,
        topology=Topology.single(),
    )  # fmt: skip
    (pack,) = minibatch.micro_batches
    starts = np.cumsum([0, *pack.sequence_lengths[:-1]])
    assert (pack.position_ids[starts] == 0).all() and (pack.position_ids == 0).sum() == len(starts)
    assert minibatch.denominators.responses == len(rollouts) < len(starts) == sum(pack.joined)


MISTAKES = {
    "observations are trained": (
        packing.build_pack,
        "mask[here] = sequence.own[one.first + 1 : one.stop + 1]",
        "mask[here] = True",
    ),
    "observations count in t": (
        SequenceLayout._counts,
        "running[self.local_index + 1] - before[ids], length[ids]",
        "self.offsets + 1, length[ids]",
    ),
    "observations count in L": (
        SequenceLayout._counts,
        "length[ids]",
        "self._to_device(self._host_lengths)[ids]",
    ),
    "observations count in the denominator": (
        packing.plan_minibatches,
        "rollouts[i].response.length",
        "len(rollouts[i].response.token_ids)",
    ),
    "a split conversation is several responses of the denominator": (
        packing.plan_minibatches,
        "sum(size > 0 for size in sizes)",
        "sum(len(sequence_lengths(rollouts[i])) for i in span)",
    ),
    "log-probs are shifted by an observation": (
        packing.scatter_to_packs,
        "values[pack.response_mask] =",
        "values[pack.response_mask.roll(1)] =",
    ),
    "sums of a split conversation start again": (
        chunk_scan._join, "apart.carry + others", "apart.carry"
    ),
    "totals of a split conversation are of its sequences": (
        chunk_scan._join, "running[:, -1][joined.rows]", "apart.total"
    ),
    "t and L of a split conversation start again": (
        SequenceLayout._counts, "self._response_lengths", "self._host_lengths"
    ),
    "the engine's log-probs are shifted by an observation": (
        packing.spread_columns,
        "values[response_mask] =",
        "values[np.roll(response_mask, 1)] =",
    ),
    "what a later history keeps counts twice in L": (
        SequenceLayout._counts, "running[ends] - before  # [R]", "running[ends] - before + 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake):
    with mutated(*MISTAKES[mistake]), pytest.raises((AssertionError, ValueError)):
        assert_correct()


def on_rank(rank, world_size):
    """Loss and gradients on data times context parallelism: all objectives on 2 x 2, one of each
    kind of scan on 1 x 4."""
    results = {}
    for cp_size, names in ((2, tuple(naive.NAMED)), (4, SCANS)):
        dp_size = world_size // cp_size
        along = [dist.new_group([*range(start, start + cp_size)])
                 for start in range(0, world_size, cp_size)]  # fmt: skip
        topology = Topology(
            world_size=world_size, rank=rank, dp_size=dp_size, dp_rank=rank // cp_size,
            cp_size=cp_size, cp_rank=rank % cp_size, cp_group=along[rank // cp_size],
        )  # fmt: skip
        totals = run(3, topology, by_turn=True, is_split=True, is_shared=cp_size == 4, names=names)
        together = torch.cat(list(totals.values()))
        dist.all_reduce(together)
        parts = together.split([len(total) for total in totals.values()])
        results[cp_size] = {name: part.numpy() for name, part in zip(totals, parts, strict=True)}
    return results if rank == 0 else None


@pytest.mark.parametrize("cp_size", [2, 4])
def test_layouts_do_not_matter(cp_size):
    assert_same(all_results()[0]["conversations"][cp_size], expected(3, by_turn=True))
