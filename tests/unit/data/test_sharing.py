"""Packs in which common beginnings are computed once, and nothing else changes.

A small transformer in float64, on the real packs, layouts and attention: log-probs and gradients
are those of packs in which every response has its whole prompt, and every mistake shows.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_rl.data import packing, prefix_tree
from megatron_rl.data.packing import (
    plan_minibatches,
)
from megatron_rl.data.sharing import Sharing
from megatron_rl.distributed import context_attention as attention
from megatron_rl.distributed.context_attention import build_attention_plan, context_attention
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.values import GaeSettings, compute_targets
from megatron_rl.rollouts.values import ends_of_turns
from megatron_rl.trainer.route_files import token_keys
from megatron_rl.types import GradeResult, Prompt, Response, Rollout
from tests.unit.objectives.mutate import mutated

VOCAB, HIDDEN, HEADS, LAYERS = 40, 16, 2, 2
ALWAYS = Sharing(1.0, always=True)


def make_rollouts(seed=0, *, groups=2, samples=4, system=9, longest=30, goes_on=False):
    """Groups whose prompts begin alike; one response in three keeps and replaces its history.

    goes_on: a replaced history has another last token, and nothing more.
    """
    draw = np.random.default_rng(seed)
    shared, rollouts = draw.integers(0, VOCAB, system).tolist(), []
    for group in range(groups):
        ids = (*shared, *draw.integers(0, VOCAB, draw.integers(3, 20)).tolist())
        prompt = Prompt(group, (), ids, "", "")
        for sample in range(samples):
            tokens = draw.integers(0, VOCAB, draw.integers(1, longest)).tolist()
            places = {}
            if sample % 3 == 2:
                kept = [*ids, *tokens][: len(ids) + len(tokens) // 2] + [1]
                kept = [*ids, *tokens[:-1]] if goes_on else kept
                observed = (len(tokens), len(tokens) + len(kept) + 1)
                tokens += [*kept, 2, *draw.integers(0, VOCAB, 4).tolist()]
                places = {"observed": (observed,), "restarts": observed[:1]}
            length = len(tokens) - sum(end - first for first, end in places.get("observed", ()))
            response = Response(
                group, sample, np.array(tokens, np.int32), np.zeros(length, np.float32), "", "stop",
                0, **places,
            )  # fmt: skip
            rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
    return rollouts


def plan(rollouts, sharing, *, tokens=10**6, topology=None):
    advantages = torch.linspace(-1, 1, len(rollouts))
    (minibatch,) = plan_minibatches(
        rollouts, advantages, minibatches=1, tokens_per_micro_batch=tokens,
        topology=topology or Topology.single(), sharing=sharing,
    )  # fmt: skip
    return minibatch


def weights():
    generator = torch.Generator().manual_seed(1)
    sizes = {"embedding": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}
    for layer in range(LAYERS):
        sizes |= {f"{name}{layer}": (HIDDEN, HIDDEN) for name in "qkvom"}
    return {
        name: torch.randn(*size, generator=generator, dtype=torch.float64).div(2).requires_grad_()
        for name, size in sizes.items()
    }


def forward(w, pack, layout):
    """Log-probs of a pack's labels; positions are added as angles, as rotary embeddings do."""
    plan, x = build_attention_plan(layout), w["embedding"][pack.tokens]
    turn = torch.polar(torch.ones(len(x), dtype=torch.float64), pack.position_ids.double() / 7)

    def heads(name, rotated):
        y = x @ w[name]
        if rotated:
            y = torch.view_as_real(torch.view_as_complex(y.view(len(x), -1, 2)) * turn[:, None])
        return y.reshape(len(x), HEADS, -1)

    for layer in range(LAYERS):
        qkv = [heads(f"{name}{layer}", name != "v") for name in "qkv"]
        x = x + context_attention(*qkv, plan=plan, group=None).flatten(1) @ w[f"o{layer}"]
        x = F.normalize(x + torch.tanh(x @ w[f"m{layer}"]), dim=-1) * HIDDEN**0.5
    logprobs = (x @ w["head"]).log_softmax(-1)
    return logprobs.gather(1, pack.labels[:, None])[:, 0] * pack.response_mask


def compute(minibatch, count, name="pnpo", *, drift=5e-4):
    """Log-probs and losses by rollout, and the gradients, of a second update of an objective."""
    w, objective, logprobs = weights(), build_objective(name), []
    loss = torch.zeros((), dtype=torch.float64)
    for pack in minibatch.micro_batches:
        layout = SequenceLayout(
            pack.sequence_lengths, pack.response_mask, joined=pack.joined, parents=pack.parents,
            used=pack.used,
        )  # fmt: skip
        own = forward(w, pack, layout)
        moved = drift * torch.cos(pack.labels.double() + pack.tokens)
        inputs = TokenInputs(own, own.detach() - moved, layout.spread_responses(pack.advantages))
        result = objective(inputs, layout=layout, denominators=minibatch.denominators)
        loss = loss + result.loss.sum()
        logprobs.append(torch.stack((own.detach(), result.loss.detach()), dim=1))
    loss.backward()
    rows = [None] * count
    for pack, values in zip(minibatch.micro_batches, logprobs, strict=True):
        parts = zip(pack.rollout_indices, values.split(list(pack.lengths)),
                    pack.response_mask.split(list(pack.lengths)), strict=True)  # fmt: skip
        for index, value, mask in parts:
            if index >= 0:
                rows[index] = value[mask]
    return torch.cat(rows), {key: value.grad for key, value in w.items()}


def gap(seed=0, **options):
    """Largest difference of log-probs and losses and relative one of gradients, shared or not."""
    return gap_of(make_rollouts(seed), **options)


def gap_of(rollouts, **options):
    apart, shared = (plan(rollouts, how, **options) for how in (None, ALWAYS))
    (a, of_apart), (b, of_shared) = (compute(one, len(rollouts)) for one in (apart, shared))
    assert len(a) == len(b) == sum(one.response.length for one in rollouts)
    worst = max((of_apart[k] - of_shared[k]).norm() / of_apart[k].norm() for k in of_apart)
    return max(float((a - b).abs().max()), float(worst))


@pytest.mark.parametrize("tokens", [10**6, 150, 60])
def test_shared_packs_have_the_same_log_probs_and_gradients(tokens):
    for seed in range(3):
        assert gap(seed, tokens=tokens) < 1e-12
    rollouts = make_rollouts(0)
    rows = [sum(map(len, (pack.tokens for pack in plan(rollouts, how).micro_batches)))
            for how in (None, ALWAYS)]  # fmt: skip
    assert rows[1] < 0.7 * rows[0]


def test_tokens_that_two_responses_sample_alike_have_a_loss_in_each():
    """PNPO's bound at a token depends on L: one weight for both would be wrong for one of them."""
    draw = np.random.default_rng(5)
    prompt = Prompt(0, (), tuple(draw.integers(0, VOCAB, 30).tolist()), "", "")
    alike = draw.integers(0, VOCAB, 12).tolist()
    rollouts = []
    for sample, further in enumerate((0, 40, 400, 40)):
        tokens = np.array([*alike, *draw.integers(0, VOCAB, further)], np.int32)
        response = Response(0, sample, tokens, np.zeros(len(tokens), np.float32), "", "stop", 0)
        rollouts.append(Rollout(prompt, response, GradeResult(0.0, "", None)))
    assert gap_of(rollouts) < 1e-12
    minibatch = plan(rollouts, ALWAYS)
    (pack,) = minibatch.micro_batches
    assert len(pack.tokens) == 30 + 12 + 52 + 412 + 52
    rows = compute(minibatch, 4, drift=1e-2)[0]
    twins = [rows[:12], rows[12:24], rows[64:76], rows[476:488]]
    for twin in twins:
        torch.testing.assert_close(twin[:, 0], rows[:12, 0], atol=1e-12, rtol=0)  # log-probs
    accepted = [int((twin[:, 1] != 0).sum()) for twin in twins]
    assert accepted[0] < accepted[1] == accepted[3] < accepted[2]


MISTAKES = {
    "a response sees a sibling": (
        SequenceLayout.rows_before,
        "starts[sequence] + self.used[sequence]",
        "starts[sequence] + self.used[sequence] + 1",
    ),
    "positions are off by one": (
        packing.build_pack, "one.first + np.arange(size)", "one.first + 1 + np.arange(size)"
    ),
    "the gradient of a prompt is counted once": (
        attention.PackedAttention.backward,
        "grad_keys[:, :, parent] += grad_keys[:, :, child]",
        "grad_keys[:, :, parent] = grad_keys[:, :, child]",
    ),
    "the first token of a response is missing": (
        packing._Sequence.path, "max(0, min(first, length - 1))", "min(first + 1, length - 1)"
    ),
    "a response enters what another one sampled": (
        prefix_tree._insert, "for owner in (ANY, path.owner)", "for owner in (ANY, 0)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake):
    function, *change = MISTAKES[mistake]
    function = function.fget if isinstance(function, property) else function
    with mutated(function, *change):
        try:
            assert gap() > 1e-6
        except (AssertionError, ValueError, IndexError, TypeError):
            return


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("discount", ["token", "turn"])
def test_advantages_of_a_critic_are_those_of_whole_sequences(discount, goes_on):
    """Also where a replaced history shares its beginning, or all, with the one before it."""
    rollouts = make_rollouts(2, samples=6, goes_on=goes_on)
    draw, found = np.random.default_rng(3), []
    values, rewards = (
        [draw.normal(size=one.response.length).astype(np.float32) for one in rollouts]
        for _ in range(2)
    )
    settings = GaeSettings(0.9, 0.7, 0.8, discount=discount)
    for sharing in (None, ALWAYS):
        packs = plan(rollouts, sharing).micro_batches
        rows = [None] * len(rollouts)
        ends = [ends_of_turns(one).astype(np.float32) for one in rollouts]
        each = (packing.scatter_to_packs(packs, one) for one in (values, rewards, ends))
        for pack, value, reward, end in zip(packs, *each, strict=True):
            layout = SequenceLayout(
                pack.sequence_lengths, pack.response_mask, joined=pack.joined,
                parents=pack.parents, used=pack.used,
            )  # fmt: skip
            cut = torch.zeros_like(pack.response_mask)
            targets = compute_targets(
                layout, value, reward, ends=end.bool(), cut=cut, settings=settings
            )
            for index, part, mask in zip(
                pack.rollout_indices, targets.advantages.split(list(pack.lengths)),
                pack.response_mask.split(list(pack.lengths)), strict=True,
            ):  # fmt: skip
                if index >= 0:
                    rows[index] = part[mask].tolist()
        found.append(rows)
    assert found[0] == found[1] and any(one.response.restarts for one in rollouts)


def group(index, prompt, lengths):
    """A group whose prompt is like no other's."""
    ids = tuple((1000 * index + np.arange(prompt)).tolist())
    return [
        Rollout(
            Prompt(index, (), ids, "", ""),
            Response(index, sample, np.arange(length), np.zeros(length), "", "stop", 0),
            GradeResult(0.0, "", None),
        )
        for sample, length in enumerate(lengths)
    ]


def assigned(rollouts, sharing, *, budget, ranks=1):
    found = packing.share_packs(
        rollouts, range(len(rollouts)), sharing=sharing, alignment=1, budget=budget, ranks=ranks,
        multiple=1,
    )  # fmt: skip
    return [sorted(pack) for own in found.packs for pack in own], found.shared


def test_groups_stay_whole_where_they_fit_and_are_cut_evenly_otherwise():
    """A group has 99 + 4 * 20 = 179 rows; of 250, none more fits. One of 8 has 259: 99 + 4 * 20."""
    rollouts = [*group(0, 100, [20] * 4), *group(1, 100, [20] * 4), *group(2, 100, [20] * 8)]
    packs, shared = assigned(rollouts, ALWAYS, budget=250)
    assert sorted(packs)[:2] == [[*range(4)], [*range(4, 8)]]
    assert [len(pack) for pack in packs] == [4] * 4
    assert {index for pack in packs for index in pack} == shared == {*range(16)}
    # Two ranks: each has half of the one group, with the prompt.
    packs, _ = assigned(group(0, 100, [20] * 8), ALWAYS, budget=1000, ranks=2)
    assert sorted(map(len, packs)) == [4, 4]


def test_ranks_get_equal_costs_not_equal_rows():
    """By rows the shortest two would be divided: 7,000 rows for each rank."""
    lengths = (6000, 3000, 3000, 1000, 1000)
    rollouts = [one for place, length in enumerate(lengths) for one in group(place, 9, [length])]
    found = packing.share_packs(
        rollouts, range(5), sharing=ALWAYS, alignment=1, budget=9000, ranks=2, multiple=1
    )
    of_ranks = [sorted(index for pack in own for index in pack) for own in found.packs]
    assert sorted(of_ranks) == [[0], [1, 2, 3, 4]]


def test_auto_leaves_alone_what_gains_nothing():
    """Long responses behind a short prompt get the packs of before; short ones are shared."""
    auto = Sharing(1700.0, slowdown=1.15)
    long, short = group(0, 150, [4000] * 4), group(1, 1000, [64] * 4)
    packs, shared = assigned(long, auto, budget=20000)
    assert shared == set() and packs == [[0, 1, 2, 3]]
    assert assigned(short, auto, budget=20000)[1] == {0, 1, 2, 3}
    assert assigned([*long, *short], auto, budget=9000)[1] in (set(), {4, 5, 6, 7})
    apart = plan(long, None).micro_batches[0]
    same = plan(long, auto).micro_batches[0]
    assert all(torch.equal(getattr(apart, name), getattr(same, name))
               for name in ("tokens", "labels", "position_ids", "response_mask"))  # fmt: skip


def test_copies_of_keys_are_bounded():
    """Behind 4,000 tokens a response of 10 has 4,009 keys, an eighth of which counts as rows.

    8,000 rows then have the prompt's 3,999 and 7 responses of 502.
    """
    packs, _ = assigned(group(0, 4000, [10] * 64), ALWAYS, budget=8000)
    assert len(packs) == 10 and max(map(len, packs)) == 7


@pytest.mark.slow
def test_prompts_that_grow_token_by_token_make_a_tree_as_deep():
    """Each of 1,100 begins with all before it: each adds a token that the next ones share."""
    tokens = np.arange(1200)
    paths = [prefix_tree.Path(place, tokens, 50 + place, 60 + place) for place in range(1100)]
    tree = prefix_tree.build_tree(paths, is_worth=lambda node: True)
    segments = prefix_tree.list_segments(tree, paths)
    shared = [one for one in segments if one.owner == prefix_tree.ANY]
    assert sum(one.stop - one.first for one in shared) == 50 + 1098
    rollouts = [group(0, 10 + place, [4])[0] for place in range(1100)]
    packs, together = assigned(rollouts, ALWAYS, budget=10**6)
    assert packs == [[*range(1100)]] and len(together) == 1100


def test_every_reader_of_a_shared_token_has_a_key_for_its_route():
    rollouts = make_rollouts(1)
    (shared,), (apart,) = (plan(rollouts, how).micro_batches for how in (ALWAYS, None))
    (whole,) = token_keys(apart)
    lengths = [n for i in apart.rollout_indices for n in packing.sequence_lengths(rollouts[i])]
    sizes = zip(lengths, apart.sequence_lengths, strict=True)
    used = torch.cat([torch.arange(size) < own for own, size in sizes])
    keys = torch.cat(token_keys(shared))
    assert set(whole[used].tolist()) <= set(keys.tolist())
    assert len(token_keys(shared)[0].unique()) == len(shared.tokens)
