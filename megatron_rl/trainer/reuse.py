"""When the reuse of a rollout batch ends before its last epoch.

Asked before each update from the second epoch on, with its gradient at hand: the update that would
cross a bound is not made, and the next rollout batch follows. The first pass over a batch is
always whole.
"""

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
        surge = self._surge(evidence) if self.bounds.head_surge is not None else None
        if not reused:
            return self._accept(surge)
        metrics = evidence.statistics.to_metrics()
        acceptance, kl = metrics["gate/acceptance"], metrics["ratio/kl_to_behavior"]
        if self.bounds.acceptance is not None and acceptance < self.bounds.acceptance:
            return f"acceptance {acceptance:.4f} is below {self.bounds.acceptance:g}"
        if self.bounds.kl is not None and kl > self.bounds.kl:
            return f"the KL to behavior, {kl:.3g}, is above {self.bounds.kl:g}"
        if surge is not None and surge.z is not None and surge.z > self.bounds.head_surge:
            return (
                f"the output layer's gradient grew by {surge.z:.2f} standard deviations more than "
                f"it does, above {self.bounds.head_surge:g}"
            )
        return self._accept(surge)

    def _surge(self, evidence: Evidence) -> "_Surge":
        energy = evidence.head_energy()
        if self.last is None:
            return _Surge(energy, None, None)
        growth = energy - self.last
        if len(self.growth) < self.bounds.window:
            return _Surge(energy, growth, None)
        spread = statistics.stdev(self.growth)
        above = growth - statistics.fmean(self.growth)
        return _Surge(energy, growth, above / spread if spread else 0.0)

    def _accept(self, surge: "_Surge | None") -> None:
        """The update is made: its gradient is what the next one is compared with."""
        if surge is not None:
            self.last = surge.energy
            if surge.growth is not None:
                self.growth.append(surge.growth)


@dataclass(frozen=True)
class _Surge:
    """One update's output layer: g, its growth, and how unusual that is."""

    energy: float
    growth: float | None  # None: nothing to compare with
    z: float | None  # None: the window is not full yet
