"""policy_loss on [B, T] is the packed objective, and adds up over parts of a minibatch."""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import OBJECTIVE_NAMES, build_objective, policy_loss
from megatron_rl.types import Denominators


def batch():
    generator = torch.Generator().manual_seed(8)
    shape = (6, 30)
    behavior = -1 - torch.rand(shape, dtype=torch.float64, generator=generator)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[:, 0] = True
    return {
        "policy_logprobs": behavior + 2e-3 * noise,
        "behavior_logprobs": behavior,
        "advantages": torch.randn(6, dtype=torch.float64, generator=generator),
        "response_mask": mask,
        "rollout_logprobs": behavior + 0.1 * noise,
    }


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_padding_is_packing(name):
    given = batch()
    loss, metrics = policy_loss(name, **given)
    mask = given["response_mask"]
    rows = [mask[row].nonzero()[:, 0] for row in range(6)]  # only the decisions, end to end

    def pack(x):
        return torch.cat([x[row][places] for row, places in enumerate(rows)])

    result = build_objective(name)(
        pack(given["policy_logprobs"]),
        behavior_logprobs=pack(given["behavior_logprobs"]),
        advantages=pack(given["advantages"][:, None].expand(mask.shape)),
        rollout_logprobs=pack(given["rollout_logprobs"]),
        layout=SequenceLayout([len(row) for row in rows], torch.ones(int(mask.sum())).bool()),
        denominators=Denominators(responses=6.0, tokens=float(mask.sum())),
    )
    assert loss.item() == pytest.approx(result.loss.sum().item(), rel=1e-12)
    assert metrics == pytest.approx(result.statistics.to_metrics(), rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_parts_add_up_with_global_denominators(name):
    given = batch()
    loss, _ = policy_loss(name, **given)
    denominators = Denominators(responses=6.0, tokens=float(given["response_mask"].sum()))
    parts = [
        policy_loss(name, **{k: v[rows] for k, v in given.items()}, denominators=denominators)[0]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(parts).item() == pytest.approx(loss.item(), rel=1e-12)


def test_a_row_without_decisions_is_not_a_response():
    given = batch()
    loss, _ = policy_loss("pnpo", **given)
    empty = {k: torch.cat((v, torch.zeros_like(v[:1]))) for k, v in given.items()}
    assert policy_loss("pnpo", **empty)[0].item() == pytest.approx(loss.item(), rel=1e-12)


def test_half_precision_is_computed_in_float32():
    # bfloat16 cannot tell a ratio of 1 from one of 1 + 7e-4: only its storage may be half.
    given = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch().items()}
    loss, _ = policy_loss("pnpo", **given)
    assert loss.dtype == torch.float32


def test_only_torch_is_needed():
    # A fresh interpreter in which importing anything heavy fails.
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('megatron', 'vllm', 'transformers', 'triton', 'pydantic', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from megatron_rl.objectives import policy_loss\n"
        "x = torch.full((1, 2), -1.0)\n"
        "loss, _ = policy_loss('pnpo', policy_logprobs=x, behavior_logprobs=x,\n"
        "    advantages=torch.ones(1), response_mask=torch.ones(1, 2).bool())\n"
        "assert abs(loss.item() - 1.0) < 1e-6\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
