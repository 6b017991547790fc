"""Calibrated bounds: reject given shares of tokens, measured on the previous update.

The state is two numbers. They are identical on every rank, because they come from reduced
histograms, and are stored in checkpoints, so that a resumed run has the same bounds.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.objectives.spec import Bounded, PpoClip
from megatron_rl.objectives.statistics import BINS, MIDDLE, bin_edge


@dataclass(frozen=True)
class Calibration:
    """Bounds of the log-weight in units of the position scale, [-low, high]; None is unbounded."""

    low: float | None
    high: float | None

    def applied(self, bounds: Bounded) -> Bounded:
        """Return the bounds with these numbers, in log space."""
        if isinstance(bounds, PpoClip) and bounds.dual is not None and bounds.space == "ratio":
            bounds = replace(bounds, low=None, space="log", dual=math.log(bounds.dual))
        return replace(bounds, low=self.low, high=self.high, space="log")


def measure(bounds: Bounded, counts: Tensor) -> Calibration | None:
    """Compute the bounds that would have rejected the requested shares; None if no ratio moved.

    counts: [2, BINS], log-weights in units of the position scale, of A < 0 and of A > 0.
    """
    assert bounds.reject_negative is not None and bounds.reject_positive is not None
    negative, positive = counts.cpu()
    low = _quantile(negative, bounds.reject_negative)
    high = _quantile(positive, 1 - bounds.reject_positive)
    if low is None or high is None:
        return None
    return Calibration(
        max(0.0, -low) if bounds.reject_negative else None,
        max(0.0, high) if bounds.reject_positive else None,
    )


def _quantile(counts: Tensor, share: float) -> float | None:
    """Interpolate linearly within a bin; 0 in the middle bin, None if all counts are in it."""
    running = counts.cumsum(0)
    if running[-1] == counts[MIDDLE]:
        return None
    target = share * running[-1]
    index = min(int(torch.searchsorted(running, target)), BINS - 1)
    distance = index - MIDDLE
    if distance == 0:
        return 0.0
    below = running[index - 1] if index else 0.0
    part = float((target - below) / counts[index]) if counts[index] else 0.0
    near, far = (bin_edge(abs(distance) - 1 + end) for end in (0, 1))
    return near + part * (far - near) if distance > 0 else -(far - part * (far - near))
