"""Specifications of the optional terms: KL penalty and rollout correction."""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.objectives.checked import Checked, Positive


@dataclass(frozen=True, kw_only=True)
class KlPenalty(Checked):
    """KL penalty: coefficient * rho_t * k_t added to the loss, differentiated in both factors.

    With q = pi_ref / pi_theta of the sampled token: k1 = -log q, k2 = (log q)^2 / 2,
    k3 = q - 1 - log q (http://joschu.net/blog/kl-approx.html). rho_t makes the expectation one
    over the policy's own action, so that k1 and k3 have the gradient of KL(pi_theta || pi_ref).
    """

    coefficient: Positive
    estimator: Literal["k1", "k2", "k3"] = "k3"


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection(Checked):
    """A constant factor for the mismatch between recomputed and engine log-probabilities.

    c = exp(behavior - rollout) of the token, of the whole response (its product) or of the
    response's geometric mean; "truncate" moves it into [low, high] (truncated importance
    sampling), "mask" replaces it by 0 outside (IcePop, arXiv 2510.18855).
    """

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: Positive | None = None
    high: Positive = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is not None and self.low >= self.high:
            raise UserError(f"low {self.low} is not below high {self.high}")
