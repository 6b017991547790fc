"""The objectives for any trainer: padded [B, T] tensors in, a scalar loss out; only torch needed.

Shapes: B responses, T positions of which `response_mask` says which are decisions.
"""

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.build import build_objective
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.types import Denominators


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
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise, and metrics: ([], {name: number}).

    Log-probabilities, mask and entropy are [B, T]; advantages [B] or [B, T]. `denominators` are
    those of the whole minibatch: if this is only a part of one (gradient accumulation, data
    parallelism), give its global numbers and add the losses of the parts; by default this batch
    is the minibatch. Responses are rows with at least one True in the mask. Raises ValueError
    naming row and position for values that cannot be used; in these messages a sequence is a
    row.
    """
    objective = name_or_objective
    if isinstance(objective, str):
        objective = build_objective(objective)
    mask = _check(policy_logprobs, response_mask)
    rows, columns = mask.shape
    if advantages.shape == (rows,):
        advantages = advantages[:, None].expand(rows, columns)
    for name, value in (
        ("behavior_logprobs", behavior_logprobs),
        ("advantages", advantages),
        ("rollout_logprobs", rollout_logprobs),
        ("reference_logprobs", reference_logprobs),
        ("entropy", entropy),
    ):
        if value is not None and value.shape != mask.shape:
            allowed = f"{tuple(mask.shape)}" + (f" or ({rows},)" if name == "advantages" else "")
            raise ValueError(f"{name} has shape {tuple(value.shape)}: it must be {allowed}")
    if denominators is None:
        decisions = int(mask.sum())
        if not decisions:
            raise ValueError(
                "response_mask is False everywhere: there is no decision to learn from"
            )
        denominators = Denominators(responses=float(mask.any(dim=1).sum()), tokens=float(decisions))
    result = objective(
        policy_logprobs.reshape(-1),
        behavior_logprobs=behavior_logprobs.reshape(-1),
        advantages=advantages.reshape(-1),
        layout=SequenceLayout([columns] * rows, mask.reshape(-1)),
        denominators=denominators,
        rollout_logprobs=None if rollout_logprobs is None else rollout_logprobs.reshape(-1),
        reference_logprobs=None if reference_logprobs is None else reference_logprobs.reshape(-1),
        entropy=None if entropy is None else entropy.reshape(-1),
    )
    return result.loss.sum(), result.statistics.to_metrics()


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
