"""A rehearsed rank holds, sends and multiplies what the real one does on gloo."""

import os

import pytest

from megatron_rl.config import parse_config
from megatron_rl.planning.rehearsal import rehearse
from tests.ranks import run_ranks
from tests.unit.planning.models import DENSE, EXPERTS, save_model

RANKS, PACKS = 4, 2
# name: model, layout, further settings. Packs hold two long responses and a shorter one.
CASES = {
    "tensor x pipeline": ("dense", {"tensor": 2, "pipeline": 2}, {}),
    "tensor x context, recomputed": (
        "dense", {"tensor": 2, "context": 2}, {"trainer": {"recompute": "full"}},
    ),
    "virtual stages x data": ("dense", {"pipeline": 2, "virtual_stages": 2}, {}),
    "experts x tensor": ("experts", {"tensor": 2, "expert": 2}, {}),
    "experts x context, KL": (
        "experts", {"context": 2, "expert": 4}, {"objective": {"name": "grpo", "kl": {
            "estimator": "k3", "coefficient": 0.1}}},
    ),
}  # fmt: skip


def make_config(folder, name):
    """The config of one case."""
    model, parallel, further = CASES[name]
    values = {
        "model": {"path": str(folder / model)},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 16},
        "parallel": parallel,
        "rollout": {"prompts": 32, "responses_per_prompt": 4, "max_response_tokens": 112},
        "trainer": {"minibatches": 1, "tokens_per_micro_batch": 320},
    }
    for section, settings in further.items():
        values[section] = values.get(section, {}) | settings
    return parse_config(values)


def seen(rehearsal):
    """What is compared: peak, FLOPs and messages of each phase."""
    return {
        name: (phase.peak, phase.flops, [vars(each) for each in phase.collectives])
        for name, phase in rehearsal.phases.items()
    } | {"built": (sum(rehearsal.states.values()), 0, [])}


def run_for_real(rank, world_size, folder):
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as the command does on a CPU
    from megatron.core import parallel_state

    from megatron_rl.distributed.cpu_attention import _triangle
    from megatron_rl.planning.actor_settings import make_groups
    from megatron_rl.planning.meter import Meter
    from megatron_rl.planning.rehearsal import measure

    results = {}
    for name in CASES:
        config, meter = make_config(folder, name), Meter()
        _triangle.cache_clear()
        with meter.watching():
            topology = make_groups(config)
            results[name] = seen(measure(config, topology, meter, micro_batches=PACKS))
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_model(path / "dense", DENSE)
    save_model(path / "experts", EXPERTS)
    return path


@pytest.fixture(scope="module")
def real(folder):
    return run_ranks(run_for_real, RANKS, folder)


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsed_rank_is_like_the_real_one(folder, real, name):
    from megatron_rl.distributed.cpu_attention import _triangle

    for rank in (0, RANKS - 1):  # of the first stage, and of the last
        _triangle.cache_clear()
        rehearsed = seen(
            rehearse(
                make_config(folder, name),
                processes=RANKS,
                rank=rank,
                device="cpu",
                micro_batches=PACKS,
            )
        )
        for phase, (peak, flops, messages) in real[rank][name].items():
            where = f"rank {rank}, {phase}"
            assert rehearsed[phase][2] == messages, where
            assert rehearsed[phase][1] == flops, where
            assert rehearsed[phase][0] == pytest.approx(peak, rel=0.01), where
