"""The reference policy gives another model's log-probs and leaves the policy unchanged."""

import pytest
import torch

from tests.functional.test_actor_layouts import make_model, make_rollouts
from tests.ranks import run_ranks


def score_by_reference(rank, world_size, root):
    """Runs on both tensor-parallel ranks; asserts there."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.reference import ReferencePolicy
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import plan_minibatches

    topology = groups.initialise(tensor=world_size)
    policy = MegatronActor(root / "policy", topology=topology, settings=ActorSettings())
    other = MegatronActor(root / "other", topology=topology, settings=ActorSettings())
    (minibatch,) = plan_minibatches(
        *make_rollouts(),
        minibatches=1,
        tokens_per_micro_batch=200,
        topology=topology,
        sequence_parallel=policy.sequence_parallel,
    )
    packs = minibatch.micro_batches
    before = {name: p.detach().clone() for name, p in policy.named_parameters_local().items()}
    own, wanted = policy.compute_logprobs(packs), other.compute_logprobs(packs)
    reference = ReferencePolicy(policy, root / "other")
    for _ in range(2):  # the reference, too, is put back whole
        for got, want in zip(reference.compute_logprobs(packs), wanted, strict=True):
            assert torch.equal(got, want)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        tokens = packs[0].tokens
        packs[0].tokens = torch.full_like(tokens, 10_000)
        reference.compute_logprobs(packs)
    packs[0].tokens = tokens
    for name, parameter in policy.named_parameters_local().items():
        assert torch.equal(parameter, before[name])
    for got, want, theirs in zip(policy.compute_logprobs(packs), own, wanted, strict=True):
        assert torch.equal(got, want) and not torch.allclose(got, theirs, atol=0.1)
    assert all(weight.device.type == "cpu" for weight in reference.inactive.values())
    with pytest.raises(ValueError, match=r"lm_head.weight is missing|has shape"):
        ReferencePolicy(policy, root / "smaller")
    return "done"


def test_reference_scores_and_restores_the_policy(tmp_path):
    make_model(tmp_path / "policy", tied=False)
    make_model(tmp_path / "other", tied=False, seed=4)
    make_model(tmp_path / "smaller", tied=True, seed=4)
    assert run_ranks(score_by_reference, 2, tmp_path) == ["done", "done"]
