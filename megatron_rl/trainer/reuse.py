"""When the reuse of a rollout batch ends before its last epoch.

Asked before each update from the second epoch on, with its gradient at hand: the update that would
cross a bound is not made, and the next rollout batch follows. The first pass over a batch is
always whole.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from megatron_rl.actor.evidence import Evidence, Rule
from megatron_rl.config import Config
from megatron_rl.config.ppo_sections import ReuseUntilSection


@dataclass
class ReuseGuard:
    """The bounds of `reuse_until`, and what the output layer's gradient was; as on every rank.

    `head_surge` is Dynamic Gradient Gating, Miao et al., arXiv 2605.19425: g the squared norm of
    the output layer's gradient, d its growth from one update to the next, over a window of updates
    z = (d - mean) / deviation; where z exceeds the bound the gradient is dropped before the
    optimizer sees it, and reuse ends. Not verified, because only its abstract and summaries could
    be read: the window's length, that the dropped update's growth stays out of the window, and that
    growth is also measured across rollout batches.
    """

    bounds: ReuseUntilSection
    last: float | None = None  # g of the update before
    growth: deque[float] = field(default_factory=deque)

    @classmethod
    def of(cls, config: Config) -> "ReuseGuard | None":
        """None where nothing ends reuse early."""
        bounds = config.reuse_until
        if bounds.acceptance is None and bounds.kl is None and bounds.head_surge is None:
            return None
        return cls(bounds, growth=deque(maxlen=bounds.window))

    def rule(self, epoch: int) -> Rule:
        """What the actor asks before an update of this epoch, from 1."""
        return lambda evidence: self._judge(evidence, reused=epoch > 1)

    def state(self) -> list[float]:
        """What a resumed run needs to go on as the uninterrupted one."""
        return [] if self.last is None else [self.last, *self.growth]

    def restore(self, state: list[float]) -> None:
        """Go on from what `state` gave."""
        self.last = state[0] if state else None
        self.growth.clear()
        self.growth.extend(state[1:])

    def _judge(self, evidence: Evidence, *, reused: bool) -> str | None:
        energy = None if self.bounds.head_surge is None else evidence.head_energy()
        reason = self._crossed(evidence, energy) if reused else None
        if reason is None and energy is not None:  # what is made is what the next one grows from
            if self.last is not None:
                self.growth.append(energy - self.last)
            self.last = energy
        return reason

    def _crossed(self, evidence: Evidence, energy: float | None) -> str | None:
        """The bound that an update would cross, None where it crosses none."""
        bounds, metrics = self.bounds, evidence.statistics.to_metrics()
        acceptance, kl = metrics["gate/acceptance"], metrics["ratio/kl_to_behavior"]
        if bounds.acceptance is not None and acceptance < bounds.acceptance:
            return f"acceptance {acceptance:.4f} is below {bounds.acceptance:g}"
        if bounds.kl is not None and kl > bounds.kl:
            return f"the KL to behavior, {kl:.3g}, is above {bounds.kl:g}"
        if bounds.head_surge is not None and energy is not None:
            surge = self._surge(energy)
            if surge > bounds.head_surge:
                return (
                    f"the output layer's gradient grew by {surge:.2f} standard deviations more "
                    f"than it does, above {bounds.head_surge:g}"
                )
        return None

    def _surge(self, energy: float) -> float:
        """How many deviations the growth lies above its mean; 0 until the window is full."""
        if self.last is None or len(self.growth) < self.bounds.window:
            return 0.0
        spread = statistics.stdev(self.growth)
        above = energy - self.last - statistics.fmean(self.growth)
        if not spread:  # it has always grown alike
            return math.inf if above > 0 else 0.0
        return above / spread
