"""Several sets in one order: shares, no repeats, nothing but seed and step."""

from collections import Counter

import pytest

from megatron_rl.data import prompts
from megatron_rl.data.mixing import PromptMix, share
from megatron_rl.data.prompt_table import JoinedPrompts
from megatron_rl.types import Prompt


def test_shares_by_hand():
    assert share(64, [3, 1]) == [48, 16]
    assert share(10, [1, 1, 1]) == [4, 3, 3]  # the first has the first of equal remainders
    assert share(8, [0.5, 0.3, 0.2]) == [4, 2, 2]  # 4, 2.4, 1.6
    with pytest.raises(
        ValueError, match=r"weights 100, 1 give a set none of rollout\.prompts_per_step=8"
    ):
        share(8, [100, 1])


def test_every_step_has_its_shares_and_every_set_its_own_epochs():
    mix = PromptMix((12, 8), (3, 1), seed=5)
    steps = [mix.indices(step, 8) for step in range(6)]
    for step in steps:
        assert len(set(step)) == 8
        assert sum(index < 12 for index in step) == 6
    # The first set has 2 steps to an epoch, the second 4.
    first = [Counter(index for step in steps[n : n + 2] for index in step if index < 12)
             for n in (0, 2, 4)]  # fmt: skip
    assert first == [Counter(range(12))] * 3
    second = Counter(index for step in steps[:4] for index in step if index >= 12)
    assert second == Counter(range(12, 20))


def test_each_permutation_of_mix_is_made_once(monkeypatch):
    """Also where steps of two epochs of each of four sets are asked for in turn, as under lag."""
    made = []
    derive = prompts.derive_seed
    monkeypatch.setattr(prompts, "derive_seed", lambda *use: made.append(use) or derive(*use))
    mix = PromptMix((8, 8, 8, 8), (1, 1, 1, 1), seed=77)  # two steps are an epoch
    for step in (1, 2) * 10:
        mix.indices(step, 16)
    assert len(made) == len(set(made)) == 4 * 2


def test_steps_follow_from_seed_alone_and_are_mixed():
    mix = PromptMix((50, 50), (1, 1), seed=1)
    order = mix.indices(3, 40)
    assert order == PromptMix((50, 50), (1, 1), seed=1).indices(3, 40)
    assert order != PromptMix((50, 50), (1, 1), seed=2).indices(3, 40)
    sides = [index < 50 for index in order]
    assert sides != sorted(sides) and sides != sorted(sides, reverse=True)


def test_recorded_order():
    """From the first version: a change would silently alter every resumed run."""
    mix = PromptMix((4, 4), (1, 1), seed=0)
    assert [mix.indices(step, 4) for step in range(2)] == [[3, 1, 6, 7], [2, 4, 0, 5]]


def test_set_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="a step of 6 prompts cannot be drawn from a set of 5"):
        PromptMix((5, 10), (3, 1), seed=1).indices(0, 8)


def test_joined_prompts_are_numbered_through():
    def numbered(*numbers):
        return [Prompt(n, ({"role": "user", "content": "x"},), (1,), "1", "s") for n in numbers]

    assert [prompt.index for prompt in JoinedPrompts([numbered(0, 4), numbered(0, 1)])] == [
        0,
        4,
        5,
        6,
    ]
