"""The table of metrics, from which docs/metrics.md is made, has what runs record and no more."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.actor.training import Update
from megatron_rl.config import parse_config
from megatron_rl.objectives.values import ValueStatistics
from megatron_rl.resharding.push import SyncStats
from megatron_rl.rollouts.batch_metrics import generation_metrics, sampling_metrics
from megatron_rl.rollouts.demonstration_source import DemonstrationSource
from megatron_rl.runs.files import PHASES, read_metrics
from megatron_rl.telemetry.loggers import OVERVIEW, tensorboard_tag
from megatron_rl.telemetry.metric_table import IN_A_BAND, TABLES
from megatron_rl.trainer.step_progress import StepProgress
from tests.unit.resharding.test_push import PHASES as SYNC_PHASES
from tests.unit.trainer.scripted import ConversingEngine, run_loop

SUPERVISED = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
UNRECORDED = SimpleNamespace(record=lambda name: None)  # conversation settings without a journal
PLACES = {
    "set": r"[\w.-]+", "k": r"\d+", "source": ".+", "epoch": r"\d+", "phase": "|".join(PHASES),
    "lag": r"\d+", "layer": r"\d+", "turn": r"\d+", "turns": r"\d+",
    "name": r"(?!shaped)[A-Za-z]\w*",
    "kind": "acceptance|effective_sample_fraction|prefix_mean_log_std|chi_square|tokens",
    "end": r"[01]\.\d", "start": r"2\^\d\d", "part": "[a-z_]+",
}  # fmt: skip


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """Every name that runs with and without optional terms leave in metrics.jsonl."""
    pushed = SyncStats(1.0, 1, 1, dict.fromkeys(SYNC_PHASES, 0.1))
    names = set(pushed.to_metrics())
    # A loop with a real engine's routes would need vLLM.
    routed = SimpleNamespace(
        engine_seconds=[1.0], rollouts=[], engine_routes_changed=torch.ones(2, 2)
    )
    names |= set(generation_metrics([routed], {}, seconds=1.0))
    masked = SimpleNamespace(response=SimpleNamespace(mask_counts=np.array([1, 3], np.int32)))
    found = sampling_metrics([masked])  # of a real engine too
    assert list(found.values()) == [2, 3, 0.5]
    names |= set(found)
    validated = SimpleNamespace(
        run=SimpleNamespace(config=parse_config(SUPERVISED)),
        prompts=SimpleNamespace(validation={"held": ()}),
        _loss=lambda prompts: 1.0,  # the real one needs an actor
    )
    names |= set(DemonstrationSource.validate(validated, 0))
    update = Update(ValueStatistics.empty(), grad_norm=1.0, learning_rate=1e-3)
    names |= set(StepProgress(1, 0, {}, critic_results=[update]).critic_metrics())
    names.add("time/critic")  # the phase of a run with a critic, in Megatron
    for case, options in {
        "plain": {},
        "named": {"named": True},
        "terms": {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.1},
        "lag": {"sections": {"lag": {"batches": 1}}},
        "experts": {"has_experts": True},
        "conversations": {"engine": ConversingEngine, "conversations": UNRECORDED},
        "sampling": {"sections": {"dynamic_sampling": {"rounds": 1}}, "solved": (0, 1, 2)},
    }.items():
        folder = tmp_path_factory.mktemp(case)
        run_loop(folder, **options)
        names |= {name for row in read_metrics(folder) for name in row}
    return names


def test_table_lists_exactly_recorded_metrics(emitted):
    names = [name for rows in TABLES if rows is not IN_A_BAND for row in rows for name in row.names]
    bands = [name for row in IN_A_BAND for name in row.names]
    alternatives = {"metric": "|".join(map(re.escape, names)), "band": "|".join(bands)}

    def pattern(name):
        parts = re.split(r"<(\w+)>", name)
        places = PLACES | alternatives
        return "".join(
            re.escape(part) if i % 2 == 0 else f"(?:{places[part]})" for i, part in enumerate(parts)
        )

    patterns = {name: re.compile(pattern(name)) for name in names}
    assert len(patterns) == len(names) > 60  # each once
    unknown = [name for name in emitted if not any(p.fullmatch(name) for p in patterns.values())]
    assert not unknown
    unused = [name for name, p in patterns.items() if not any(p.fullmatch(e) for e in emitted)]
    assert not unused
    seen = {name.split("/")[-1] for name in emitted if name.startswith("by_")}
    assert seen == set(bands)


def test_tensorboard_overview_lists_existing_metrics(emitted):
    shown = {name for name in emitted if tensorboard_tag(name).startswith("0_overview/")}
    assert shown == {*OVERVIEW, "eval/held/avg@2"}
    assert len(shown) == 12
    assert all(tensorboard_tag(name).count("/") == 1 for name in shown)
    assert len({tensorboard_tag(name) for name in emitted}) == len(emitted)
