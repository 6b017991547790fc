"""M2PO's constraint: which log-ratios a minibatch can bear.

Zheng, Zhao, Chen, "Prosperity before Collapse", arXiv 2510.01161, algorithm 1: while the mean
square of the trust-region tokens' log-ratios exceeds a threshold, the largest is masked. What is
masked then lies above some size, so for one minibatch the mask is a gate. Shapes: N tokens.
"""

import torch
from torch import Tensor

from megatron_rl.objectives.spec import HardGate, SecondMoment, Unconstrained


def second_moment_gate(
    constraint: SecondMoment, log_ratios: Tensor, advantages: Tensor
) -> HardGate | Unconstrained:
    """The gate [exp(-b), exp(b)], by the sign of A, that masks what the algorithm would; [N] each.

    b lies halfway between the largest log-ratio that stays and the smallest that goes, so that
    rounding moves neither across. Equally large ones go together. Log-ratios that are not finite
    are left to those who report them.
    """
    trust = (log_ratios * advantages > 0) & torch.isfinite(log_ratios)
    sizes = log_ratios[trust].double().abs().sort().values
    means = sizes.square().cumsum(0) / torch.arange(1, len(sizes) + 1, device=sizes.device)
    staying = int((means <= constraint.threshold).sum())  # the means of sorted squares never fall
    if staying == len(sizes):
        return Unconstrained()
    smallest_gone = sizes[staying]
    kept = sizes[sizes < smallest_gone]
    bound = (float(smallest_gone) + (float(kept[-1]) if len(kept) else 0.0)) / 2
    return HardGate(low=bound, high=bound, space="log", sided="advantage")
