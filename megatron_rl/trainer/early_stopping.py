"""Early stopping of reuse: end the epochs on a rollout batch before `trainer.epochs`.

The criteria are evaluated before each update from the second epoch on, when its gradient is
computed: the update that would cross a bound is not made, and the next rollout batch follows. The
first epoch is never stopped.
"""

from dataclasses import dataclass

from megatron_rl.actor.actor import StopRule
from megatron_rl.config import Config
from megatron_rl.config.sections import EarlyStoppingSection
from megatron_rl.objectives.statistics import Statistics


@dataclass(frozen=True)
class EarlyStopping:
    """The bounds of `early_stopping`."""

    bounds: EarlyStoppingSection

    @classmethod
    def of(cls, config: Config) -> "EarlyStopping | None":
        """Build from a config; None if no bound is set."""
        bounds = config.early_stopping
        return None if bounds.acceptance is None and bounds.kl is None else cls(bounds)

    def rule(self, epoch: int) -> StopRule | None:
        """Return the rule for the updates of an epoch, from 1; None in the first."""
        return self._crossed_bound if epoch > 1 else None

    def _crossed_bound(self, statistics: Statistics) -> str | None:
        """Describe the bound that an update with these statistics would cross, if any."""
        bounds, metrics = self.bounds, statistics.to_metrics()
        acceptance, kl = metrics["gate/acceptance"], metrics["ratio/kl_to_behavior"]
        if bounds.acceptance is not None and acceptance < bounds.acceptance:
            return f"acceptance {acceptance:.4f} is below {bounds.acceptance:g}"
        if bounds.kl is not None and kl > bounds.kl:
            return f"the KL to behavior, {kl:.3g}, is above {bounds.kl:g}"
        return None
