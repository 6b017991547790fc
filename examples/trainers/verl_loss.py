"""PNPO as a loss of verl 0.9.1 (docs/use-in-your-trainer.md)."""

from verl.trainer.ppo.core_algos import register_policy_loss

from megatron_rl.objectives import build_objective, policy_loss
from megatron_rl.types import Denominators

PNPO = build_objective("pnpo")


@register_policy_loss("megatron_rl_pnpo")
def pnpo_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    sizes = config.global_batch_info  # of the mini-batch, which one optimizer step sees
    missing = {"dp_size", "global_batch_size", "batch_num_tokens"} - {k for k in sizes if sizes[k]}
    if missing:
        raise ValueError(f"verl gave no {missing}: without them a part counts as the whole")
    if rollout_is_weights is not None:
        raise ValueError(
            "set algorithm.rollout_correction.rollout_is to null: its weights are unused"
        )
    denominators = Denominators(
        responses=float(sizes["global_batch_size"]), tokens=float(sizes["batch_num_tokens"])
    )
    loss, metrics = policy_loss(
        PNPO,
        policy_logprobs=log_prob,
        behavior_logprobs=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        denominators=denominators,
        metrics="summary",  # always the same names, as verl demands of its ranks
    )
    return loss * sizes["dp_size"], {f"actor/{k}": v for k, v in metrics.items()}
