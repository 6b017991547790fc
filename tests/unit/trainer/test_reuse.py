"""What ends the reuse of a rollout batch, around scripts and on numbers followed by hand."""

from dataclasses import dataclass

import pytest

from megatron_rl.config.ppo_sections import ReuseUntilSection
from megatron_rl.runs.rows import read_metrics
from megatron_rl.trainer.reuse import ReuseGuard
from tests.unit.trainer.scripted import make_config, run_loop


@dataclass
class Seen:
    """An update's evidence: what its statistics say, and its output layer's gradient."""

    acceptance: float = 1.0
    kl: float = 0.0
    energy: float = 0.0

    @property
    def statistics(self):
        return self

    def to_metrics(self):
        return {"gate/acceptance": self.acceptance, "ratio/kl_to_behavior": self.kl}

    def head_energy(self):
        return self.energy


def guard(**bounds):
    return ReuseGuard.of(make_config(sections={"reuse_until": bounds}))


def test_nothing_is_asked_where_nothing_is_bounded():
    assert guard() is None


@pytest.mark.parametrize(
    ("bounds", "fine", "crossing", "words"),
    [
        ({"acceptance": 0.5}, Seen(acceptance=0.5), Seen(acceptance=0.49), "acceptance 0.4900"),
        ({"kl": 0.1}, Seen(kl=0.1), Seen(kl=0.11), "KL to behavior, 0.11, is above 0.1"),
    ],
)
def test_a_bound_holds_from_the_second_epoch_on(bounds, fine, crossing, words):
    one = guard(**bounds)
    assert one.rule(1)(crossing) is None  # the first pass is always whole
    assert one.rule(2)(fine) is None
    assert words in one.rule(2)(crossing)


def test_a_surge_of_the_output_layers_gradient_is_one_beside_its_own_window():
    one = guard(head_surge=2.0, window=3)
    # Growths 1, 2, 3: mean 2, sample deviation 1. Until there are three, nothing is judged.
    for energy in (10.0, 11.0, 13.0, 16.0):
        assert one.rule(2)(Seen(energy=energy)) is None
    # Growth 4.1 is 2.1 deviations above the mean; in a first epoch it is made all the same.
    assert "grew by 2.10 standard deviations" in one.rule(2)(Seen(energy=20.1))
    assert one.state() == [16.0, 1.0, 2.0, 3.0]  # what was not made is not compared with
    assert one.rule(2)(Seen(energy=20.0)) is None  # 2.0 deviations are not above 2
    assert one.state() == [20.0, 2.0, 3.0, 4.0]
    assert one.rule(1)(Seen(energy=99.0)) is None
    assert one.state()[0] == 99.0
    other = guard(head_surge=2.0, window=3)
    other.restore(one.state())
    assert other.state() == one.state()
    for seen in (Seen(energy=100.0), Seen(energy=300.0)):
        assert one.rule(2)(seen) == other.rule(2)(seen)


def test_the_update_that_crosses_is_not_made_and_the_next_batch_follows(tmp_path):
    """Two steps of 3 epochs x 2 minibatches; the fifth call surges, and none in the second step."""
    energies = (1, 2, 3, 4, 500, *range(5, 30))
    events, trainer = run_loop(
        tmp_path, sections={"reuse_until": {"head_surge": 3.0, "window": 2}}, energies=energies
    )
    first, second = read_metrics(tmp_path)[1:]
    assert (first["train/updates"], first["train/reuse_stopped"]) == (4, 1)
    assert (second["train/updates"], second["train/reuse_stopped"]) == (6, 0)
    assert first["train/updates_skipped"] == 0
    assert trainer.actor.updates == 10
    # The second batch is frozen under the policy that four updates made.
    assert [e[1] for e in events if e[0] == "update"] == [{0.0}] * 5 + [{-4.0}] * 6
    assert trainer.reuse.last == 10  # of the eleventh call


def test_bounds_without_reuse_are_refused():
    with pytest.raises(ValueError, match=r"trainer\.epochs=1 reuses none"):
        make_config(sections={"reuse_until": {"kl": 0.1}}, epochs=1)
    assert ReuseUntilSection().window == 16
