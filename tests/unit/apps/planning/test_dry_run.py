"""Dry runs match the memory, messages and FLOPs of real ranks on gloo."""

import os
from unittest import mock

import pytest

from megatron_rl.apps.planning.dry_run import dry_run_rank
from megatron_rl.config import parse_config
from tests.ranks import run_ranks
from tests.unit.apps.planning.models import DENSE, EXPERTS, WINDOW, save_model

RANKS, PACKS = 4, 2
# name: model, layout, other settings. Packs contain two long responses and a shorter one.
CASES = {
    "sliding window, tensor x context, recomputed": (
        "window", {"tensor": 2, "context": 2}, {
            "trainer": {"recompute": "full"}, "critic": {},
        },
    ),
    "experts x tensor, adapters, KL": (
        "experts", {"tensor": 2, "expert": 2}, {
            "lora": {"rank": 4}, "optimizer": {"learning_rate": 1e-4},
            "objective": {"name": "grpo", "kl": {"estimator": "k3", "coefficient": 0.1}},
        },
    ),
    "tensor x pipeline, two teachers": (
        "dense", {"tensor": 2, "pipeline": 2}, {"model": {"reference": ("window", "dense")},
        "objective": {"name": "grpo", "advantage_coefficient": 0,
            "kl": {"estimator": "reverse_kl", "coefficient": 1}}},
    ),
}  # fmt: skip
FURTHER = {
    "virtual stages x data, critic": (
        "dense", {"pipeline": 2, "virtual_stages": 2}, {"critic": {"length_alpha": 0.1}},
    ),
    "experts x context, KL": (
        "experts", {"context": 2, "expert": 4}, {"objective": {"name": "grpo", "kl": {
            "estimator": "k3", "coefficient": 0.1}}},
    ),
}  # fmt: skip


def make_config(folder, name):
    """Build the config of one case."""
    model, parallel, further = (CASES | FURTHER)[name]
    values = {
        "model": {"path": str(folder / model)},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 16},
        "parallel": parallel,
        "rollout": {"prompts_per_step": 32, "responses_per_prompt": 4, "max_response_tokens": 112},
        "trainer": {"minibatches": 1, "tokens_per_micro_batch": 320},
    }
    for section, settings in further.items():
        values[section] = values.get(section, {}) | settings
    if isinstance(teachers := values["model"].get("reference"), tuple):
        values["model"]["reference"] = {one: str(folder / one) for one in teachers}
    return parse_config(values)


def counts(dry_run):
    """Return peak, FLOPs and messages of each phase."""
    return {
        name: (phase.peak, phase.flops, [vars(each) for each in phase.collectives])
        for name, phase in dry_run.phases.items()
    } | {"built": (sum(dry_run.states.values()), 0, [])}


def run_real_rank(rank, world_size, folder, names):
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as the command does on a CPU
    from megatron.core import parallel_state

    from megatron_rl.actor import cpu_adaptation
    from megatron_rl.apps.planning.dry_run import measure
    from megatron_rl.apps.planning.fake_device import Meter
    from megatron_rl.distributed.context_attention import _last_rows
    from megatron_rl.trainer.actor_settings import make_groups

    results = {}
    for name in names:
        config, meter = make_config(folder, name), Meter()
        _last_rows.cache_clear()
        # Megatron's own collectives, as between devices
        own = mock.patch.object(cpu_adaptation, "_parts_in_place", return_value=None)
        with own, meter.watching():
            topology = make_groups(config)
            results[name] = counts(measure(config, topology, meter, micro_batches=PACKS))
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_model(path / "dense", DENSE)
    two = {"num_hidden_layers": 2}
    save_model(path / "experts", EXPERTS | two)
    save_model(path / "window", WINDOW | two)
    return path


@pytest.fixture(scope="module")
def real(request, folder):
    """Counts of the ranks, for the cases that are selected."""
    tests = (one for one in request.session.items if one.module is request.module)
    return run_ranks(run_real_rank, RANKS, folder, [one.callspec.params["name"] for one in tests])


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in FURTHER)]
)
def test_dry_run_matches_real_rank(folder, real, name):
    from megatron_rl.distributed.context_attention import _last_rows

    config = make_config(folder, name)
    # Of the last stage, and of the first.
    for rank in (RANKS - 1, 0)[: config.parallel.pipeline]:
        _last_rows.cache_clear()
        dry = counts(
            dry_run_rank(config, processes=RANKS, rank=rank, device="cpu", micro_batches=PACKS)
        )
        for phase, (peak, flops, messages) in real[rank][name].items():
            message = f"rank {rank}, {phase}"
            assert dry[phase][2] == messages, message
            assert dry[phase][1] == flops, message
            assert dry[phase][0] == pytest.approx(peak, rel=0.01), message
