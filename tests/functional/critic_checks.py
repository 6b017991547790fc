"""A critic in one layout, and the same by transformers and loops; for test_actor_layouts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

GAMMA, LAMBDA, TARGET_LAMBDA, CLIP = 0.97, 0.8, 0.9, 0.5
CUT = (2, 9)  # responses that a limit of length cut, the second without a reward at the cut


def head_weight(hidden):
    return torch.randn(hidden, generator=torch.Generator().manual_seed(11))


def rewards_of(rollouts):
    """A reward at every fifth decision, counted from 1, and one at the last."""
    return [
        [0.5 if t % 5 == 0 else 0.0 for t in range(1, rollout.response.length)]
        + [0.0 if n == CUT[1] else 1.0 - n % 3]
        for n, rollout in enumerate(rollouts)
    ]


def run_critic(model, topology, settings, rollouts, plan, folder):
    """Values, advantages and targets; an update, repeated from a checkpoint; values after it.

    The step is the gradient: Adam with an epsilon far above every gradient.
    """
    from megatron_rl.actor.critic import Critic
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.data.packing import FILLER, gather_by_rollout, scatter_to_packs
    from megatron_rl.objectives.values import GaeSettings

    optimizer = OptimizerSection(
        learning_rate=1e7, epsilon=1e8, weight_decay=0.0, max_grad_norm=0.0
    )
    settings = replace(settings, optimizer=optimizer, warmup_updates=0, temperature=0.7)
    critic = Critic(model, topology=topology, settings=settings)
    if topology.is_last_stage:
        weight = critic.chunks[-1].output_layer.weight
        assert not weight.any()  # values begin at 0
        with torch.no_grad():
            weight.copy_(head_weight(weight.shape[1])[None])
    critic.optimizer.reload_model_params()
    (minibatch,) = plan(critic, rollouts, torch.ones(len(rollouts)), minibatches=1)
    packs = minibatch.micro_batches
    rows = [torch.tensor(row).numpy() for row in rewards_of(rollouts)]
    rewards = scatter_to_packs(packs, rows)
    ends = [pack.response_mask for pack in packs]  # not read: gamma counts tokens
    cut = [torch.tensor([i in CUT for i in pack.rollout_indices]) for pack in packs]
    gae = GaeSettings(GAMMA, LAMBDA, TARGET_LAMBDA)

    def by_rollout():
        targets = critic.compute_targets(packs, rewards, ends, cut, settings=gae)
        columns = [
            gather_by_rollout(
                packs, [one[:, k].contiguous() for one in targets],
                count=len(rollouts), topology=topology,
            )
            for k in range(3)
        ]  # fmt: skip
        return targets, [[row.tolist() for row in column] for column in columns]

    targets, before = by_rollout()
    assert FILLER not in packs[0].rollout_indices
    for pack, one in zip(packs, targets, strict=True):
        # As if computed a while ago: some values have moved beyond the clip since.
        pack.values, pack.returns = one[:, 0] + 0.4 * one[:, 1].sign(), one[:, 2]
    critic.sleep()
    critic.save(folder / "critic")
    result = critic.update(minibatch, clip=CLIP)
    metrics = result.statistics.to_metrics()
    first = critic.digest()["sum"]
    critic.load(folder / "critic")
    critic.update(minibatch, clip=CLIP)
    assert critic.digest()["sum"] == first  # bit for bit from the checkpoint
    for pack in packs:
        pack.values = None  # else those would be taken
    return {"before": before, "after": by_rollout()[1], "metrics": metrics}


def run_adapted_critic(model, topology, settings, rollouts, plan, folder):
    """Losses of three updates of adapters and head, values after them; all else stays as it is."""
    from megatron_rl.actor.critic import Critic
    from megatron_rl.config.sections import LoraSection, OptimizerSection
    from megatron_rl.data.packing import gather_by_rollout, scatter_to_packs
    from megatron_rl.objectives.values import GaeSettings

    optimizer = OptimizerSection(learning_rate=3e-2, epsilon=1e-3, weight_decay=0.0)
    settings = replace(
        settings, optimizer=optimizer, warmup_updates=0, lora=LoraSection(rank=4, alpha=8.0)
    )
    critic = Critic(model, topology=topology, settings=settings)
    frozen = {n: p.detach().clone() for n, p in critic.tensors().items() if not p.requires_grad}
    trained = [n for n, p in critic.tensors().items() if p.requires_grad]
    heads = [name for name in trained if "lora_" not in name]
    assert len(heads) == topology.is_last_stage and frozen
    (minibatch,) = plan(critic, rollouts, torch.ones(len(rollouts)), minibatches=1)
    packs = minibatch.micro_batches
    rewards = scatter_to_packs(packs, [torch.tensor(row).numpy() for row in rewards_of(rollouts)])
    ends = [pack.response_mask for pack in packs]
    cut = [torch.zeros(len(pack.rollout_indices), dtype=bool) for pack in packs]
    gae, losses = GaeSettings(GAMMA, LAMBDA, TARGET_LAMBDA), []
    first = critic.compute_targets(packs, rewards, ends, cut, settings=gae)
    for pack, one in zip(packs, first, strict=True):
        pack.values, pack.returns = one[:, 0], one[:, 2]
    for number in range(3):
        if number == 2:
            critic.sleep()
            critic.save(folder / "adapted critic")
        losses.append(critic.update(minibatch, clip=None).statistics.to_metrics()["critic/loss"])
    digest = critic.digest()["sum"]
    critic.load(folder / "adapted critic")
    critic.update(minibatch, clip=None)
    assert critic.digest()["sum"] == digest  # bit for bit, the head too
    tensors = critic.tensors()
    assert all(torch.equal(tensors[name], value) for name, value in frozen.items())
    for pack in packs:
        pack.values = None
    last = critic.compute_targets(packs, rewards, ends, cut, settings=gae)
    values = [one[:, 0].contiguous() for one in last]
    rows = gather_by_rollout(packs, values, count=len(rollouts), topology=topology)
    assert losses[2] < 0.9 * losses[0]
    return {"losses": losses, "values": [row.tolist() for row in rows]}


def expected_critic(model, rollouts):
    """The same with transformers in float64, one token after the other."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).model
    head = head_weight(network.config.hidden_size).double().requires_grad_()

    def values_of(rollout):
        tokens = [*rollout.prompt.token_ids, *rollout.response.token_ids]
        hidden = network(torch.tensor([tokens])).last_hidden_state[0]
        start = len(rollout.prompt.token_ids) - 1
        return hidden[start : start + rollout.response.length] @ head

    def targets(values, rewards, is_cut, lam):
        is_open = is_cut and rewards[-1] == 0
        after, following, found = 0.0, values[-1] if is_open else 0.0, []
        for value, reward in zip(reversed(values), reversed(rewards), strict=True):
            after = reward + GAMMA * following - value + GAMMA * lam * after
            found.append(after)
            following = value
        return found[::-1]

    before, loss, tokens = [[], [], []], 0.0, sum(one.response.length for one in rollouts)
    sums = SimpleNamespace(clipped=0)
    for n, (rollout, rewards) in enumerate(zip(rollouts, rewards_of(rollouts), strict=True)):
        values = values_of(rollout)
        given = values.tolist()
        advantages = targets(given, rewards, n in CUT, LAMBDA)
        target = targets(given, rewards, n in CUT, TARGET_LAMBDA)
        returns = torch.tensor([a + v for a, v in zip(target, given, strict=True)]).double()
        for column, row in zip(before, (given, advantages, returns.tolist()), strict=True):
            column.append(row)
        old = torch.tensor(given).double() + 0.4 * torch.tensor(advantages).sign()
        near = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        plain, clipped = (values - returns) ** 2, (near - returns) ** 2
        sums.clipped += int((clipped > plain).sum())
        loss = loss + torch.maximum(plain, clipped).sum() / 2 / tokens
    loss.backward()
    with torch.no_grad():
        for parameter in (head, *network.parameters()):
            parameter.sub_(0.1 * parameter.grad)  # learning rate / epsilon
        after = [values_of(rollout).tolist() for rollout in rollouts]
    return before, after, loss.item(), sums.clipped / tokens


def check_critic(report, model, rollouts):
    before, after, loss, clipped = expected_critic(model, rollouts)
    for mine, wanted in zip(report["before"], before, strict=True):
        for row, want in zip(mine, wanted, strict=True):
            assert row == pytest.approx(want, rel=1e-4, abs=2e-5)
    assert report["metrics"]["critic/loss"] == pytest.approx(loss, rel=1e-5)
    assert report["metrics"]["critic/clipped_fraction"] == pytest.approx(clipped, abs=1e-6)
    moved = 0.0
    for row, want, start in zip(report["after"][0], after, before[0], strict=True):
        assert row == pytest.approx(want, rel=1e-4, abs=1e-4)
        moved = max(moved, *(abs(a - b) for a, b in zip(want, start, strict=True)))
    assert moved > 0.1
