"""When groups are generated and trained: worked out by hand for every policy."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import pytest

from megatron_rl.config import parse_config
from megatron_rl.rollouts.schedule import build_schedule
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptSlot


@dataclass(frozen=True)
class Held:
    """A group as the schedule sees it."""

    generated_at_step: int
    longest: int = 1
    first_trained_at_step: int = 0
    times_trained: int = 0


def make_schedule(*, groups=4, steps=8, lag=None, replay=None, seed=3):
    return build_schedule(
        parse_config(
            {
                "model": {"path": "m"}, "data": {"train": "t"}, "seed": seed,
                "rollout": {"prompts_per_step": groups}, "trainer": {"steps": steps, "minibatches":
                1},
                "lag": lag or {}, "replay": replay or {},
            }
        )
    )  # fmt: skip


def walk(schedule, longest=lambda slot: 1):
    """Each step's (generated, trained) slots with the lags of the trained, as a buffer would."""
    held, steps = {}, []
    for step in range(1, schedule.steps + 1):
        new = [slot for slot in schedule.due(step) if slot not in held]
        held |= {slot: Held(step, longest(slot)) for slot in new}
        trained = schedule.select(step, held)
        lags = [step - held[slot].generated_at_step for slot in trained]
        for slot in trained:
            one = held[slot]
            first = one.first_trained_at_step or step
            held[slot] = Held(one.generated_at_step, one.longest, first, one.times_trained + 1)
        steps.append((new, trained, lags))
    return steps


def whole(step, groups=4):
    return [PromptSlot(step, group) for group in range(groups)]


def test_zero_lag_step_generates_and_trains_its_own_slots():
    for step, (new, trained, lags) in enumerate(walk(make_schedule()), start=1):
        assert new == trained == whole(step)
        assert lags == [0] * 4


def test_queue_is_filled_before_first_step_and_ends_empty():
    walked = walk(make_schedule(lag={"batches": 2}, steps=5))
    # Three batches at once, then one a step; nothing is generated that no step will train.
    assert [{slot.step for slot in new} for new, _, _ in walked] == [
        {1, 2, 3},
        {4},
        {5},
        set(),
        set(),
    ]
    assert [trained for _, trained, _ in walked] == [whole(step) for step in range(1, 6)]
    assert [lags[0] for _, _, lags in walked] == [0, 1, 2, 2, 2]


def test_publishing_every_third_step_generates_three_batches_at_once():
    walked = walk(make_schedule(lag={"sync_weights_every": 3}, steps=7))
    generated = [{slot.step for slot in new} for new, _, _ in walked]
    assert generated == [{1, 2, 3}, set(), set(), {4, 5, 6}, set(), set(), {7}]
    assert [lags[0] for _, _, lags in walked] == [0, 1, 2, 0, 1, 2, 0]
    # With a queue on top: batch 4 would be generated in step 2, by weights pushed before step 1.
    walked = walk(make_schedule(lag={"sync_weights_every": 3, "batches": 2}, steps=7))
    assert [lags[0] for _, _, lags in walked] == [0, 1, 2, 3, 4, 2, 3]


def test_drawn_lag_depends_on_slot_and_covers_range():
    lag = {"policy": "research.lag_policies:UniformLag", "settings": {"low": 1, "high": 3}}
    schedule = make_schedule(lag=lag, groups=8, steps=40)
    walked = walk(schedule)
    assert [trained for _, trained, _ in walked] == [whole(step, 8) for step in range(1, 41)]
    counts = Counter(lag for _, _, lags in walked[3:] for lag in lags)
    assert counts.keys() == {1, 2, 3} and min(counts.values()) > 60  # of 296, 99 each on average
    again, other = (make_schedule(lag=lag, groups=8, steps=40, seed=seed) for seed in (3, 4))
    assert [w[2] for w in walk(again)] == [w[2] for w in walked] != [w[2] for w in walk(other)]


def test_long_groups_are_overtaken_but_not_lost():
    """One batch ahead, a step later per 10 tokens; the last group of every batch has 25."""
    schedule = make_schedule(
        lag={"policy": "research.lag_policies:LengthLag", "settings": {"batches": 1, "tokens": 10}},
        steps=6,
    )
    walked = walk(schedule, longest=lambda slot: 25 if slot.group == 3 else 5)
    trained = [slot for _, step, _ in walked for slot in step]
    assert sorted(trained) == [slot for step in range(1, 7) for slot in whole(step)]  # each once
    # Step 1: two batches. The long (1, 3) is ready in 1 + 2 = 3, so (2, 0) overtakes it.
    assert walked[0][1] == [PromptSlot(1, 0), PromptSlot(1, 1), PromptSlot(1, 2), PromptSlot(2, 0)]
    at = {slot: step for step, (_, some, _) in enumerate(walked, start=1) for slot in some}
    assert at[PromptSlot(1, 3)] == 3
    # Slots are generated once, also those that were trained before their step.
    assert all(count == 1 for count in Counter(s for new, _, _ in walked for s in new).values())


def test_replay_draws_whole_groups_without_repeating_one_and_counts_them():
    schedule = make_schedule(groups=8, steps=30, replay={"capacity": 3, "fresh": 0.5})
    walked = walk(schedule)
    assert walked[0][1] == whole(1, 8)  # nothing to replay yet
    for step, (new, trained, lags) in enumerate(walked[1:], start=2):
        assert new == whole(step, 4)
        assert len(set(trained)) == 8 and set(new) <= set(trained)
        assert max(lags) <= 2  # what the last two steps trained first
        assert trained != sorted(trained)  # mixed: each minibatch has its part of both
    drawn = Counter(lag for _, _, lags in walked[3:] for lag in lags if lag)
    assert drawn.keys() == {1, 2} and min(drawn.values()) > 30  # of 108, half each on average
    assert [w[1] for w in walk(schedule)] == [w[1] for w in walked]


def test_prompts_of_two_steps_never_overlap_within_pass():
    schedule = make_schedule(groups=8, steps=9, replay={"capacity": 2, "fresh": 0.5})
    assert [schedule.prompts(step) for step in (1, 2, 3)] == [(0, 8), (2, 4), (3, 4)]
    assert [make_schedule().prompts(step) for step in (1, 2, 3)] == [(0, 4), (1, 4), (2, 4)]


class Wrong:
    """A policy that breaks its own rules."""

    def __init__(self, *, seed, steps, value=None):
        self.value = value

    def most(self):
        return 1

    def lag(self, slot):
        return self.value

    def ready(self, slot, *, generated, longest):
        return 0


class Half:
    """A policy without an order."""

    def __init__(self, *, seed, steps):
        self.most = self.lag = None


@pytest.mark.parametrize(
    ("lag", "output"),
    [
        ({"policy": "nowhere:Mine"}, "lag.policy=nowhere:Mine: No module named 'nowhere'"),
        ({"policy": f"{__name__}:Nothing"}, "has no attribute 'Nothing'"),
        ({"policy": f"{__name__}:Wrong", "settings": {"low": 1}}, "unexpected keyword argument"),
        ({"policy": f"{__name__}:Half"}, "has no ready; write most, lag and ready"),
        ({"policy": "research.lag_policies:UniformLag", "settings": {"low": 2, "high": 1}},
         "give 0 <= low <= high; settings: {'low': 2, 'high': 1}"),
    ],
)  # fmt: skip
def test_impossible_lags_are_refused_by_name(lag, output):
    with pytest.raises(ValueError, match=re.escape(output)):
        make_schedule(lag=lag)


@pytest.mark.parametrize("value", [-1, 2, 0.5, None])
def test_answer_of_a_policy_is_checked(value):
    wrong = make_schedule(lag={"policy": f"{__name__}:Wrong", "settings": {"value": value}})
    with pytest.raises(ValueError, match=r"Wrong gives .* it must be an integer from 0 to .*, 1"):
        wrong.due(1)


def test_replay_that_cannot_fill_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"raise replay\.capacity to 4 or more"):
        make_schedule(replay={"capacity": 2, "fresh": 0.25})


@dataclass(frozen=True)
class AnyOrder:
    """Trains waiting groups in an order drawn from all that a policy may use, or by step."""

    seed: int
    steps: int
    spread: int

    def most(self):
        return 3

    def lag(self, slot):
        return derive_seed(self.seed, "lag", *slot) % 4

    def ready(self, slot, *, generated, longest):
        drawn = derive_seed(self.seed, *slot, generated, longest) % (self.spread + 1)
        return slot.step + drawn


def test_step_that_selects_without_coming_groups_selects_the_same_with_them():
    """Groups that engines of their own generate meanwhile are not waited for only then."""
    found = Counter()
    for seed, spread in itertools.product(range(6), (0, 1, 3)):
        lag = {"policy": f"{__name__}:AnyOrder", "settings": {"spread": spread}}
        replay = {"capacity": 3, "fresh": 0.5} if seed % 2 else {}
        schedule = make_schedule(lag=lag, replay=replay, seed=seed)
        held = {}
        for step in range(1, schedule.steps + 1):
            coming = [slot for slot in schedule.due(step) if slot not in held]
            lengths = {slot: derive_seed(seed, "length", *slot) % 6 for slot in coming}
            whole = held | {slot: Held(step, lengths[slot]) for slot in coming}
            trained = schedule.select(step, whole)
            is_free = schedule.selects_without(step, held, coming, longest=5)
            found[is_free] += bool(coming)
            if is_free:
                assert schedule.select(step, held) == trained
            held = whole
            for slot in trained:
                one = held[slot]
                first = one.first_trained_at_step or step
                held[slot] = Held(one.generated_at_step, one.longest, first, one.times_trained + 1)
    assert min(found[True], found[False]) > 10
