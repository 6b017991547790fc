"""Properties of the prefix-normalized weight, for any log-ratios."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.constraints import log_bounds
from megatron_rl.objectives.named import NAMED
from megatron_rl.objectives.weights import LogRatios, compute_log_weight

LOG_RATIOS = st.lists(st.floats(-5, 5), min_size=1, max_size=60)


def ratios_of(values):
    layout = SequenceLayout([len(values)], torch.ones(len(values)).bool())
    return LogRatios.of(torch.tensor(values, dtype=torch.float64), layout)


@settings(max_examples=40, deadline=None)
@given(values=LOG_RATIOS, other=st.floats(-5, 5), cut=st.integers(0, 59))
def test_prefix_mean_has_its_properties(values, other, cut):
    ratios = ratios_of(values)
    log_w = compute_log_weight("prefix_mean", ratios)
    # The local ratio at t = 1, the sequence ratio at t = L.
    assert log_w[0].item() == values[0]
    sequence = compute_log_weight("sequence_mean", ratios)
    assert log_w[-1].item() == pytest.approx(sequence[-1].item(), rel=1e-12, abs=1e-15)
    # A monotone transform of the cumulative ratio at every t.
    assert torch.equal(log_w.sign(), compute_log_weight("prefix_product", ratios).sign())
    # Causal: what comes after the cut does not matter before it.
    cut = min(cut, len(values) - 1)
    changed = values[: cut + 1] + [other] * (len(values) - cut - 1)
    again = compute_log_weight("prefix_mean", ratios_of(changed))
    assert torch.equal(again[: cut + 1], log_w[: cut + 1])


def test_gate_narrows_along_response_to_base_interval():
    layout = SequenceLayout([100], torch.ones(100).bool())
    lower, upper = log_bounds(NAMED["pnpo"].constraint, layout, torch.float64)
    assert upper[-1].item() == pytest.approx(math.log1p(9.5e-4), rel=1e-12)
    assert lower[-1].item() == pytest.approx(math.log1p(-7e-4), rel=1e-12)
    assert upper[0].item() == pytest.approx(math.log1p(9.5e-4 * 10), rel=1e-12)  # sqrt(100 / 1)
    assert (upper.diff() < 0).all()
    assert (lower.diff() > 0).all()


def test_lower_bound_vanishes_at_zero_tolerance():
    # eps_low * sqrt(L / t) >= 1 for t <= 0.7^2 * 100: a ratio is positive, nothing is below.
    gate = type(NAMED["pnpo"].constraint)(low=0.7, high=0.1, scale="sqrt(L/t)")
    layout = SequenceLayout([100], torch.ones(100).bool())
    lower, _ = log_bounds(gate, layout, torch.float64)
    assert lower.isinf().sum().item() == 49
    assert lower[48].item() == -math.inf
    assert lower[49].item() == pytest.approx(math.log(1 - 0.7 * math.sqrt(2)), rel=1e-9)
