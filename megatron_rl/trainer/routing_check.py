"""The part of the policy's drift that comes from tokens that changed their experts."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.types import Minibatch, TokenBatch

WARN_ABOVE = 0.1  # fraction of the variance
NAME = "routing/log_ratio_variance_fraction"


def measure_routing(actor: MegatronActor, minibatch: Minibatch) -> dict[str, float]:
    """Score one pack of each replica with the recorded and with the router's own choices.

    The metric is the variance, over responses, of the difference that the choices make to the mean
    log-ratio of a response, divided by the variance of that mean log-ratio as it is trained. Empty
    without recorded routes, nan for a policy that has not moved and for packs without a response.
    Collective.
    """
    pack = minibatch.micro_batches[0]
    if pack.routes is None:
        return {}
    recorded, own = (
        _mean_log_ratios(pack, actor.compute_logprobs([pack], routing=routing)[0])
        for routing in ("recorded", "own")
    )
    used = recorded if actor.routing.replays else own
    sums = torch.stack([_moments(used), _moments(own - recorded)])  # [2, 3]
    sums = reduce_sum(sums.to(actor.topology.device), group=actor.topology.dp_group)
    if not sums[0, 0]:  # every reward was equal, so nothing is trained
        return {NAME: float("nan")}
    total, difference = ((s2 / n - (s1 / n) ** 2) for n, s1, s2 in sums.tolist())
    return {NAME: difference / total if total > 0 else float("nan")}


def routing_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if changed experts cause much of the drift; else None."""
    fraction = metrics.get(NAME, 0.0)
    if not fraction > WARN_ABOVE:
        return None
    return (
        f"warning: {fraction:.0%} of the variance of responses' log-ratios comes from tokens that "
        "are assigned to other experts than in the behavior pass (routing/changed_fraction = "
        f"{metrics['routing/changed_fraction']:.2f}); model.routing_replay=behavior replays them"
    )


def _mean_log_ratios(pack: TokenBatch, logprobs: Tensor) -> Tensor:
    """Mean log-ratio to the behavior policy of each response in a pack; [responses] float64."""
    assert pack.behavior_logprobs is not None, "compute behavior log-probs before"
    ratios = (logprobs - pack.behavior_logprobs.to(logprobs.device)).double().cpu()
    ends = [0, *torch.tensor(pack.lengths).cumsum(0).tolist()]
    masks = [pack.response_mask[first:end].cpu() for first, end in pairwise(ends)]
    means = [
        ratios[first:end][mask].mean()
        for (first, end), mask in zip(pairwise(ends), masks, strict=True)
        if mask.any()
    ]
    return torch.stack(means) if means else torch.empty(0, dtype=torch.float64)


def _moments(values: Tensor) -> Tensor:
    """Number, sum and sum of squares; [3]."""
    return torch.stack([torch.tensor(float(len(values)), dtype=torch.float64),
                        values.sum(), values.square().sum()])  # fmt: skip
