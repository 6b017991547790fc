"""Formulas compared with one H100 80GB HBM3 (2026-11-22; docs/measurements.md).

The published 1.5B with random weights in bfloat16, one device, one pack.
"""

from dataclasses import replace
from statistics import fmean

import pytest
from megatron_rl.apps.planning.built_in import MODELS
from megatron_rl.apps.planning.devices import DEVICES, GIB
from megatron_rl.apps.planning.footprint import footprint
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.apps.planning.training_time import TrainingTime
from megatron_rl.apps.planning.workload import Packs, Workload

from megatron_rl.apps.planning.generation import Engine

SHAPE, H100 = MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], DEVICES["h100"]
EQUAL, SHORT, LONG = [4096] * 4, [512] * 32, [32768]
UNEQUAL = [2000, 3000, 700, 90, 5000, 1300, 2200, 2094]
# Lengths, recomputation, layers, milliseconds of an update; with fused Adam, except those marked
# "old Adam".
UPDATES = [
    (EQUAL, "none", "local", 476.1),
    (UNEQUAL, "none", "local", 490.3),
    (EQUAL, "full", "local, old Adam", 596.9),
    (SHORT, "none", "local, old Adam", 445.3),
    (LONG, "full", "local, old Adam", 1889.4),
    (EQUAL, "none", "TE", 471.3),
    (UNEQUAL, "none", "TE", 424.9),
    (EQUAL, "full", "TE", 559.9),
    (UNEQUAL, "full", "TE", 523.6),
    (LONG, "full", "TE", 1698.9),
]
LOGPROBS = [(EQUAL, 140.2), (UNEQUAL, 136.4), (SHORT, 125.7)]  # milliseconds


def one_pack(lengths, recompute="none"):
    pack = Packs(1, sum(lengths), sum(length**2 for length in lengths))
    return TrainingTime(SHAPE, Parts(recompute=recompute, tokens=sum(lengths)), H100), pack


def planned_update(lengths, recompute):
    training, pack = one_pack(lengths, recompute)
    return 1e3 * (training._pass_seconds(pack, backward=True) + training._optimizer())


@pytest.mark.parametrize("lengths,recompute,layers,measured", UPDATES)
def test_update_time_is_within_15_percent_of_measurement(lengths, recompute, layers, measured):
    assert planned_update(lengths, recompute) == pytest.approx(measured, rel=0.15)


def test_update_times_are_unbiased_on_average():
    ratios = [planned_update(lengths, kind) / measured for lengths, kind, _, measured in UPDATES]
    assert fmean(ratios) == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("lengths,measured", LOGPROBS)
def test_logprob_pass_time_is_within_10_percent_of_measurement(lengths, measured):
    training, pack = one_pack(lengths)
    assert 1e3 * training._pass_seconds(pack, backward=False) == pytest.approx(measured, rel=0.1)


def test_offload_time_matches_measurement():
    # 0.42 to 0.57 s to the host and 0.43 to 0.50 s back, except the first time.
    assert 0.85 <= TrainingTime(SHAPE, Parts(), H100).offload() <= 1.07


@pytest.mark.parametrize(
    "recompute,layers,measured", [("none", "local", 61.8), ("none", "TE", 61.9), ("full", "TE", 33)]
)
def test_footprint_matches_measured_peak(recompute, layers, measured):
    planned = footprint(SHAPE, Parts(recompute=recompute, tokens=16384), micro_batches=1)
    assert planned.train / GIB == pytest.approx(measured, rel=0.01)


def test_generation_of_many_short_sequences_is_bound_by_host():
    # 32 prompts x 8 responses of 1,024 tokens by the 1.5B; 64 x 8 of 38 by 2 layers of 64.
    load = Workload(prompts=32, samples=8, minibatches=4, epochs=4, max_prompt=256,
                    max_response=1024, mean_prompt=215, mean_response=970,
                    max_num_seqs=256)  # fmt: skip
    large = Engine(SHAPE, 1, H100, H100.memory // 2)
    assert large._decode([1024] * 256, load) == pytest.approx(10.8, rel=0.1)
    tiny = replace(SHAPE, num_layers=2, hidden_size=64, num_attention_heads=2, num_query_groups=2,
                   head_dim=32, ffn_hidden_size=192, vocab_size=25)  # fmt: skip
    few = replace(load, mean_prompt=38)
    assert Engine(tiny, 1, H100, 4 * GIB)._decode([38] * 512, few) == pytest.approx(1.0, rel=0.25)
