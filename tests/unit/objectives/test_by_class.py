"""Sums by class against loops in float64, one token at a time."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenClasses, TokenInputs, build_objective
from megatron_rl.objectives.statistics import BAND_SUMS, class_metrics, class_rows, class_sums
from megatron_rl.types import Denominators


def test_each_class_is_summed_apart_and_nothing_is_lost():
    """Two responses of 4 and 12 tokens, classes 0 and 1 within each; PNPO's weight and gate."""
    generator = torch.Generator().manual_seed(0)
    lengths, size = (8, 16), 24
    mask = torch.zeros(size, dtype=torch.bool)
    mask[2:6] = mask[10:22] = True
    behavior = -torch.rand(size, generator=generator, dtype=torch.float64)
    policy = behavior + 0.03 * torch.randn(size, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0] * 8 + [-2.0] * 16, dtype=torch.float64)
    advantages[12] = 0.0
    classes = torch.arange(size) // 4 % 2
    objective = build_objective("pnpo", constraint={"low": 0.01, "high": 0.01})
    result = objective(
        TokenInputs(policy, behavior, advantages),
        layout=SequenceLayout(lengths, mask),
        denominators=Denominators(2.0, 16.0),
        classes=TokenClasses(classes, 2),
    )
    table = torch.stack(tuple(class_sums(result.statistics.classes).values()), dim=-1)

    expected = torch.zeros_like(table)
    for start, end in ((2, 6), (10, 22)):
        length, prefix = end - start, 0.0
        for t, place in enumerate(range(start, end), start=1):
            ratio = float(policy[place] - behavior[place])
            prefix += ratio
            weight = math.exp(prefix / t)
            reach = 0.01 * math.sqrt(length / t)
            inside = 1 - reach <= weight <= 1 + reach
            movable = advantages[place] != 0
            kept = weight if inside and movable else 0.0
            tenth = max(d for d in range(10) if t / length > d / 10)
            expected[classes[place], tenth] += torch.tensor(
                [1, movable, movable and inside, kept, kept**2, prefix / t, (prefix / t) ** 2,
                 math.expm1(ratio) ** 2], dtype=torch.float64,
            )  # fmt: skip
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-15)
    assert table[..., 0].sum() == 16 and 0 < table[..., 2].sum() < 15  # the gate rejects some


def test_fractions_follow_from_sums():
    """Four tokens, three of them movable, two inside with weights 1 and 3."""
    sums = {
        "inside_positive": 1, "inside_negative": 1, "above_positive": 1, "inside_zero": 1,
        "weight": 4, "weight_squared": 10, "log_w": 2.0, "log_w_squared": 1.5,
        "deviation_squared": 0.8,
    }  # fmt: skip
    row = [sums.get(name, 0) for name in BAND_SUMS]
    metrics = class_metrics(torch.tensor(row, dtype=torch.float64))
    assert metrics == pytest.approx(
        {
            "tokens": 4,
            "prefix_mean_log_std": math.sqrt(1.5 / 4 - 0.25),
            "chi_square": 0.2,
            "acceptance": 2 / 3,
            "effective_sample_fraction": 16 / 30,
        }
    )
    nothing = class_metrics(torch.zeros(len(BAND_SUMS)))
    assert nothing.pop("tokens") == 0 and all(value.isnan() for value in nothing.values())


def test_sums_of_bands_are_those_of_single_class():
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(400, generator=generator) < 0.8
    behavior = -torch.rand(400, generator=generator)
    statistics = build_objective("pnpo", constraint={"low": 0.01, "high": 0.01})(
        TokenInputs(
            behavior + 0.03 * torch.randn(400, generator=generator),
            behavior,
            torch.randint(-1, 2, (400,), generator=generator).float(),
        ),
        layout=SequenceLayout((100, 300), mask),
        denominators=Denominators(2.0, float(mask.sum())),
        classes=TokenClasses(torch.zeros(400, dtype=torch.long), 1),
    ).statistics
    (of_bands,) = class_rows([replace(statistics, classes=None)])
    torch.testing.assert_close(of_bands, statistics.classes, rtol=1e-12, atol=1e-12)
