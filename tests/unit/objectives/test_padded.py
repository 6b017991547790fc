"""policy_loss on [B, T] is the packed objective, and adds up over parts of a minibatch."""

import pytest
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs, build_objective, policy_loss
from megatron_rl.objectives.inputs import MinibatchTokens
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
        "advantages": -torch.randn(6, dtype=torch.float64, generator=generator),  # balanced: < 1
        "response_mask": mask,
        "rollout_logprobs": behavior + 0.1 * noise,
    }


@pytest.mark.parametrize("name", ["pnpo", "gspo", "balanced", "oapl"])
def test_padding_is_packing(name):
    given = batch()
    loss, metrics = policy_loss(name, **given)
    mask = given["response_mask"]
    rows = [mask[row].nonzero()[:, 0] for row in range(6)]  # only the decisions, end to end

    def pack(x):
        return torch.cat([x[row][places] for row, places in enumerate(rows)])

    advantages = pack(given["advantages"][:, None].expand(mask.shape))
    behavior = pack(given["behavior_logprobs"])
    log_ratios = pack(given["policy_logprobs"]) - behavior
    result = build_objective(name).resolve(MinibatchTokens.whole(log_ratios, advantages, behavior))(
        TokenInputs(
            policy_logprobs=pack(given["policy_logprobs"]),
            behavior_logprobs=pack(given["behavior_logprobs"]),
            advantages=advantages,
            rollout_logprobs=pack(given["rollout_logprobs"]),
        ),
        layout=SequenceLayout([len(row) for row in rows], torch.ones(int(mask.sum())).bool()),
        denominators=Denominators(responses=6.0, tokens=float(mask.sum())),
    )
    assert loss.item() == pytest.approx(result.loss.sum().item(), rel=1e-12)
    assert metrics == pytest.approx(result.statistics.to_metrics(), rel=1e-9)


@pytest.mark.parametrize("name", ["pnpo", "balanced"])
def test_parts_add_up_with_global_denominators(name):
    given = batch()
    loss, _ = policy_loss(name, **given)
    mask = given["response_mask"]
    denominators = Denominators(responses=6.0, tokens=float(mask.sum()))
    # What a whole minibatch decides (`second_moment`, `balanced`) is decided before it is cut.
    policy, behavior = given["policy_logprobs"][mask], given["behavior_logprobs"][mask]
    advantages = given["advantages"][:, None].expand(mask.shape)[mask]
    resolved = build_objective(name).resolve(
        MinibatchTokens.whole(policy - behavior, advantages, behavior)
    )
    parts = [
        policy_loss(resolved, **{k: v[rows] for k, v in given.items()}, denominators=denominators)[
            0
        ]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(parts).item() == pytest.approx(loss.item(), rel=1e-12)


def test_row_without_decisions_is_not_response():
    given = batch()
    loss, _ = policy_loss("pnpo", **given)
    empty = {k: torch.cat((v, torch.zeros_like(v[:1]))) for k, v in given.items()}
    assert policy_loss("pnpo", **empty)[0].item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("policy", torch.bfloat16), ("behavior", torch.float16), ("rollout", torch.bfloat16)],
)
def test_half_precision_is_refused(name, dtype):
    # 1 + 7e-4 is 1 in bfloat16, and so is a log-prob of -1 + 7e-4.
    given = batch()
    given[f"{name}_logprobs"] = given[f"{name}_logprobs"].to(dtype)
    with pytest.raises(ValueError, match=rf"{name}_logprobs are {dtype}: .* in float32"):
        policy_loss("pnpo", **given)
    # Advantages and entropy lose nothing that a gate would see.
    given = batch()
    given["advantages"] = given["advantages"].sign()
    wanted, _ = policy_loss("pnpo", **given)
    assert policy_loss("pnpo", **given | {"advantages": given["advantages"].to(dtype)})[0] == wanted


def test_summary_is_dozen_of_same_numbers():
    given = {**batch(), "entropy": torch.ones(6, 30)}
    loss, everything = policy_loss("pnpo", **given)
    same, summary = policy_loss("pnpo", **given, metrics="summary")
    assert same == loss
    assert summary.items() <= everything.items()
    assert len(summary) == 13  # all of SUMMARY but the KL, which pnpo does not have
    assert len(everything) > 150
    with pytest.raises(ValueError, match="metrics is 'few': choose one of all, summary"):
        policy_loss("pnpo", **given, metrics="few")


@pytest.mark.slow
def test_padded_objectives_need_only_torch():
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
    subprocess.run([sys.executable, "-c", code], check=True)
