"""The objectives for any trainer: from padded [B, T] tensors to a scalar loss; needs only torch.

Shapes: B responses, T positions; `response_mask` marks the valid decisions.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.inputs import MinibatchTokens, TokenInputs
from megatron_rl.objectives.objective import PolicyObjective, build_objective
from megatron_rl.objectives.spec import check
from megatron_rl.types import Denominators

# Metrics that `metrics="summary"` returns, if present.
SUMMARY = (
    "tokens",
    "tokens_with_advantage",
    "responses",
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "entropy",
    "gate/acceptance",
    "ratio/kl_to_behavior",
    "ratio/max_deviation",
    "ratio/prefix_mean_log_std",
    "weight/effective_sample_fraction",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/logprob_abs_diff_max",
)


def policy_loss(
    name_or_objective: str | PolicyObjective,
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    denominators: Denominators | None = None,
    metrics: Literal["all", "summary"] = "all",
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss to minimize, and metrics: ([], {name: number}).

    Log-probabilities, mask and entropy are [B, T]; advantages [B] or [B, T]. `denominators` are
    those of the whole minibatch: for a part of one (gradient accumulation, data parallelism), pass
    the global numbers and add the losses of the parts; by default this batch is the minibatch. The
    constraint `second_moment` (`m2po`) and the factor of `balanced` always use this batch alone.
    Responses are rows with at least one True in the mask. `metrics` "all" returns hundreds of
    numbers by position, "summary" a dozen. Raises ValueError for log-probabilities in half
    precision, and for invalid values, with their row (the "sequence") and position.
    """
    check("metrics", metrics, Literal["all", "summary"])
    objective = name_or_objective
    if isinstance(objective, str):
        objective = build_objective(objective)
    mask = _check(policy_logprobs, response_mask)
    rows, columns = mask.shape
    if advantages.shape == (rows,):
        advantages = advantages[:, None].expand(rows, columns)
    inputs = _flat_inputs(
        mask.shape,
        policy_logprobs=policy_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        rollout_logprobs=rollout_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
    )
    if denominators is None:
        decisions = int(mask.sum())
        if not decisions:
            raise ValueError(
                "response_mask is False everywhere: there is no decision to learn from"
            )
        denominators = Denominators(responses=float(mask.any(dim=1).sum()), tokens=float(decisions))
    decided = mask.reshape(-1)
    behavior = inputs.behavior_logprobs
    log_ratios = inputs.policy_logprobs.detach() - behavior
    tokens = (x[decided] for x in (log_ratios, inputs.advantages, behavior))
    result = objective.resolve(MinibatchTokens.whole(*tokens))(
        inputs,
        layout=SequenceLayout([columns] * rows, decided),
        denominators=denominators,
    )
    numbers = result.statistics.to_metrics()
    if metrics == "summary":
        numbers = {name: numbers[name] for name in SUMMARY if name in numbers}
    return result.loss.sum(), numbers


def _flat_inputs(shape: torch.Size, **given: Tensor | None) -> TokenInputs:
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if value.shape != shape:
            allowed = f"{tuple(shape)}" + (f" or ({shape[0]},)" if name == "advantages" else "")
            raise ValueError(f"{name} has shape {tuple(value.shape)}: it must be {allowed}")
        flat[name] = value.reshape(-1)
    return TokenInputs(**flat)


def _check(policy_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    if policy_logprobs.dim() != 2 or policy_logprobs.numel() == 0:
        raise ValueError(
            f"policy_logprobs have shape {tuple(policy_logprobs.shape)}: they must be [B, T], one "
            "row per response"
        )
    if response_mask.shape != policy_logprobs.shape:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)} but policy_logprobs "
            f"{tuple(policy_logprobs.shape)}: both must be [B, T]"
        )
    if response_mask.dtype != torch.bool and not bool(
        ((response_mask == 0) | (response_mask == 1)).all()
    ):
        raise ValueError("response_mask has values other than 0 and 1")
    return response_mask.bool()


def pnpo_loss(
    policy_logprobs: Tensor,  # [B, T] log pi_theta(y_t | x, y_<t)
    behavior_logprobs: Tensor,  # [B, T] log pi_beta(y_t | x, y_<t)
    advantages: Tensor,  # [B] A_i
    mask: Tensor,  # [B, T] bool, True where y_t is a decision
    *,
    low: float = 7e-4,  # epsilon_-
    high: float = 9.5e-4,  # epsilon_+
) -> Tensor:
    """Compute -1/B sum_i 1/L_i sum_t sg[M_t w_t A_i] log pi_theta(y_t | x, y_<t); []."""
    log_ratio = torch.where(mask, policy_logprobs - behavior_logprobs, 0)
    t = mask.cumsum(dim=1).clamp(min=1)  # position of each decision
    L = mask.sum(dim=1, keepdim=True)  # noqa: N806 - the paper's name
    w = torch.exp(log_ratio.cumsum(dim=1) / t)  # w_t = (rho_1 ... rho_t)^(1/t)
    h = torch.sqrt(L / t)
    M = (1 - low * h <= w) & (w <= 1 + high * h)  # noqa: N806
    coefficient = (M * w * advantages[:, None]).detach()
    score = torch.where(mask, coefficient * policy_logprobs, 0)
    return -(score / L).sum(dim=1).mean()
