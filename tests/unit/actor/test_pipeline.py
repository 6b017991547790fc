"""Stages that know every pack exchange no shapes, and compute what Megatron's own hops would."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.functional.test_actor_layouts import freeze_behavior, make_model, make_rollouts
from tests.ranks import run_ranks

LAYOUTS = {
    "pp2": {"pipeline": 2},
    "pp2-v2": {"pipeline": 2, "virtual_stages": 2},
    "tp2-pp2-v2": {"tensor": 2, "pipeline": 2, "virtual_stages": 2},  # sequence parallelism
    "pp4": {"pipeline": 4},
}


class Messages(TorchDispatchMode):
    """Counts tensors sent between stages by whether they are floating point; shapes are not."""

    def __init__(self):
        super().__init__()
        self.sent = {True: 0, False: 0}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.c10d.send.default:
            (tensor,) = arguments[0]
            self.sent[tensor.is_floating_point()] += 1
        return function(*arguments, **(options or {}))


def _train(root, topology):
    """Log-probs, two updates and the weights after them; and the messages of all that."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.data.packing import plan_minibatches
    from megatron_rl.objectives import build_objective

    settings = ActorSettings(learning_rate=1e-3, warmup_updates=0, overlap_reduction=True)
    actor = MegatronActor(root, topology=topology, settings=settings)
    assert not actor.chunks[0].config.batch_p2p_sync  # a wait for the device after each hop
    (minibatch,) = plan_minibatches(
        *make_rollouts(),
        minibatches=1,
        tokens_per_micro_batch=64,
        topology=topology,
        sequence_parallel=actor.sequence_parallel,
    )
    sizes = {len(pack.tokens) for pack in minibatch.micro_batches}
    assert len(minibatch.micro_batches) > 2 and len(sizes) > 1
    with Messages() as messages:
        packs = freeze_behavior(actor, [minibatch])
        norms = [actor.update(minibatch, build_objective("grpo")).grad_norm for _ in range(2)]
    values = [pack.behavior_logprobs for pack in packs] + [*actor.named_parameters_local().values()]
    return norms, [value.detach().clone() for value in values], messages.sent


def compare_hops(rank, world_size, root):
    """Each layout with known shapes and with Megatron's own communicator; asserts here."""
    from megatron.core import parallel_state

    from megatron_rl.actor import actor as actor_module
    from megatron_rl.actor import groups

    for name, layout in LAYOUTS.items():
        topology = groups.initialise(**layout)
        norms, values, sent = _train(root, topology)
        with mock.patch.object(actor_module, "pipeline_arguments", lambda *_, **__: {}):
            their_norms, theirs, all_sent = _train(root, topology)
        assert norms == their_norms and norms[0] > 1e-3, name
        assert all(torch.equal(mine, one) for mine, one in zip(values, theirs, strict=True)), name
        hops = sent[True]
        assert hops > 0 and sent == {True: hops, False: 0}, (name, sent)
        assert all_sent == {True: hops, False: hops}, (name, all_sent)
        parallel_state.destroy_model_parallel()
    return "done"


def test_fixed_shapes_are_not_exchanged_and_results_are_bit_identical(tmp_path):
    make_model(tmp_path, tied=True)
    assert run_ranks(compare_hops, 4, tmp_path) == ["done"] * 4


def send_another_shape(rank, world_size, root):
    """A stage whose tensor is not the one that the others expect; asserts there."""
    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.pipeline import KnownShapes
    from megatron_rl.actor.settings import ActorSettings

    topology = groups.initialise(pipeline=2)
    actor = MegatronActor(root, topology=topology, settings=ActorSettings())
    hops = KnownShapes(config=actor.chunks[0].config, tokens=[8, 4])
    if rank == 0:
        hops._communicate_shapes(torch.empty(8, 1, 32), None, False, False)
        assert hops._communicate_shapes(None, None, False, True) == ([0, 0, 0], [8, 1, 32])
        with pytest.raises(AssertionError, match=r"sends \[8, 1, 32\] where .* expect \[4, 1, 32"):
            hops._communicate_shapes(torch.empty(8, 1, 32), None, False, False)
    return "done"


def test_tensor_of_another_shape_is_refused(tmp_path):
    make_model(tmp_path, tied=True)
    assert run_ranks(send_another_shape, 2, tmp_path) == ["done"] * 2
