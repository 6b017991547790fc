"""A response of advantage 0 adds nothing to loss and gradient, if the objective declares it.

In float64, so that what is left out may change sums by rounding alone.
"""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.types import Denominators
from tests.unit.objectives.test_invariance import CASES, PADDED, build, minibatch

ZERO = (1, 4, 5, 8)  # of ten responses


def loss_and_gradients(objective, rows, denominators):
    """Loss of one pack of these responses, and the gradients of log-probs and entropy by row."""
    mask, tensors = minibatch()
    tensors["advantages"] = tensors["advantages"].clone()
    tensors["advantages"][list(ZERO)] = 0
    lengths = [PADDED[row] for row in rows]

    def pack(x):
        return torch.cat([x[row, : PADDED[row]] for row in rows])

    local = {key: pack(x) for key, x in tensors.items()}
    policy = local.pop("policy_logprobs").requires_grad_()
    entropy = local["entropy"].requires_grad_()
    layout = SequenceLayout(lengths, pack(mask))
    inputs = TokenInputs(policy_logprobs=policy, **local)
    log_ratios = policy.detach() - local["behavior_logprobs"]
    given = (log_ratios, local["advantages"], local["behavior_logprobs"])
    objective = objective.resolve(MinibatchTokens.whole(*(column[pack(mask)] for column in given)))
    loss = objective(inputs, layout=layout, denominators=denominators).loss.sum()
    loss.backward()
    of_entropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    parts = zip(policy.grad.split(lengths), of_entropy.split(lengths), strict=True)
    return loss.item(), dict(zip(rows, map(torch.stack, parts), strict=True))


# A user's own loss may add to the gradient anywhere, so it is always computed.
@pytest.mark.parametrize("case", [case for case in CASES if "function" not in str(case)], ids=str)
def test_zero_advantage_adds_to_loss_or_gradient_only_where_objective_says_so(case):
    objective = build(case)
    denominators = Denominators(responses=10.0, tokens=float(minibatch()[0].sum()))
    everything, gradients = loss_and_gradients(objective, range(len(PADDED)), denominators)
    kept = [row for row in range(len(PADDED)) if row not in ZERO]
    loss, few = loss_and_gradients(objective, kept, denominators)
    adds = [bool((gradients[row] != 0).any()) for row in ZERO]
    assert adds == [objective.uses_zero_advantage] * len(ZERO)
    if not objective.uses_zero_advantage:
        assert loss == pytest.approx(everything, rel=1e-13, abs=1e-16)
    for row in kept:
        torch.testing.assert_close(few[row], gradients[row], rtol=1e-13, atol=1e-16)
