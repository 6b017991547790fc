"""Early stopping of reuse: the criteria by hand, and in a scripted loop."""

from dataclasses import dataclass

import pytest

from megatron_rl.runs.files import read_metrics
from megatron_rl.trainer.step_progress import EarlyStopping
from tests.unit.trainer.scripted import make_config, run_loop


@dataclass
class FakeStatistics:
    """The two metrics that the criteria read."""

    acceptance: float = 1.0
    kl: float = 0.0

    def to_metrics(self):
        return {"gate/acceptance": self.acceptance, "ratio/kl_to_behavior": self.kl}


def build(**bounds):
    return EarlyStopping.of(make_config(sections={"early_stopping": bounds}))


def test_early_stopping_without_bounds_is_off():
    assert build() is None


@pytest.mark.parametrize(
    ("bounds", "within", "crossing", "message"),
    [
        (
            {"acceptance": 0.5},
            FakeStatistics(acceptance=0.5),
            FakeStatistics(acceptance=0.49),
            "acceptance 0.4900",
        ),
        (
            {"kl": 0.1},
            FakeStatistics(kl=0.1),
            FakeStatistics(kl=0.11),
            "KL to behavior, 0.11, is above 0.1",
        ),
    ],
)
def test_early_stopping_applies_from_second_epoch(bounds, within, crossing, message):
    early_stopping = build(**bounds)
    assert early_stopping.rule(1) is None  # the first epoch is never stopped
    assert early_stopping.rule(2)(within) is None
    assert message in early_stopping.rule(2)(crossing)


def test_update_beyond_limit_is_not_made_and_next_batch_follows(tmp_path):
    """Two steps of 3 epochs x 2 minibatches; only the fifth update drifts."""
    events, trainer = run_loop(tmp_path, sections={"early_stopping": {"kl": 0.1}}, drifted=(5,))
    first, second = read_metrics(tmp_path)[1:]
    assert (first["train/updates"], first["train/early_stopped"]) == (4, 1)
    assert (second["train/updates"], second["train/early_stopped"]) == (6, 0)
    assert first["train/updates_skipped"] == 0
    assert trainer.actor.updates == 10
    # The second batch is frozen under the policy that four updates made.
    assert [e[1] for e in events if e[0] == "update"] == [{0.0}] * 5 + [{-4.0}] * 6
