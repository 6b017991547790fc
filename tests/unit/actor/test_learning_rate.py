"""Learning rates against values computed by hand."""

import pytest

from megatron_rl.actor.learning_rate import learning_rate_at
from megatron_rl.actor.settings import ActorSettings


def _rates(count, **settings):
    settings = ActorSettings(learning_rate=1.0, total_updates=8, **settings)
    return [learning_rate_at(update, settings) for update in range(count)]


def test_warmup_starts_above_zero_and_ends_at_full_rate():
    assert _rates(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert _rates(2, warmup_updates=0) == [1.0, 1.0]


def test_decays_reach_minimum_at_last_update():
    linear = _rates(9, warmup_updates=4, decay="linear", min_learning_rate=0.2)
    assert linear[4:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = _rates(8, warmup_updates=4, decay="cosine")
    assert cosine[5] == pytest.approx(0.5)  # half-way: cos(pi / 2) = 0
    assert cosine[7] == pytest.approx(0.0)
