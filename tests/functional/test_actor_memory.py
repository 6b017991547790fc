"""Sleeping frees gradients, keeps the policy, and changes no later number; recompute neither."""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tests.functional.test_actor_layouts import freeze_behavior, make_model, make_rollouts, plan
from tests.ranks import run_ranks


@contextmanager
def _counted_gathers():
    """The dtypes of the tensors that are gathered on one rank."""
    original, seen = dist.gather, []

    def counting(tensor, *args, **options):
        seen.append(tensor.dtype)
        return original(tensor, *args, **options)

    dist.gather = counting
    try:
        yield seen
    finally:
        dist.gather = original


def _train(rank, world_size, folder):
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.memory import training_state_bytes
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection
    from megatron_rl.objectives import build_objective

    topology = groups.initialise(context=world_size)
    report = {}
    for name, recompute in (("plain", "none"), ("sleepy", "none"), ("full", "full")):
        settings = ActorSettings(
            optimizer=OptimizerSection(learning_rate=1e-2), warmup_updates=0, recompute=recompute
        )
        actor = MegatronActor(Path(folder), topology=topology, settings=settings)
        (minibatch,) = plan(actor, *make_rollouts(), minibatches=1, tokens=240)
        packs = freeze_behavior(actor, [minibatch])
        numbers = []
        for _ in range(3):
            result = actor.update(minibatch, build_objective("grpo"))
            numbers += [result.grad_norm, result.statistics.to_metrics()["loss/policy"]]
            if name == "sleepy":
                held = training_state_bytes(actor.ddp_chunks, actor.optimizer)
                actor.sleep()
                less = training_state_bytes(actor.ddp_chunks, actor.optimizer)
                parameters = sum(p.numel() for p in actor.named_parameters_local().values())
                assert held - less >= 4 * parameters  # the float32 gradient buffers are gone
                with _counted_gathers() as gathered:
                    actor.save(Path(folder).parent / "checkpoint")
                assert actor.asleep
                assert training_state_bytes(actor.ddp_chunks, actor.optimizer) == less
                assert torch.float32 not in gathered  # each rank writes its own slice
            numbers.append(sum(x.sum().item() for x in actor.compute_logprobs(packs)))
        report[name] = numbers
    return json.dumps(report)


def test_sleep_and_recompute_change_no_number(tmp_path):
    make_model(tmp_path / "model", tied=True, layers=2)
    for text in run_ranks(_train, 2, str(tmp_path / "model")):
        report = json.loads(text)
        assert report["sleepy"] == report["plain"]
        assert report["full"] == report["plain"]
        assert report["plain"][0] > 0
