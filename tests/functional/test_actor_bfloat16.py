"""The actor in bfloat16: float32 log-probs, gradients and main weights, and exact checkpoints."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.functional.test_actor_layouts import (
    freeze_behavior,
    make_model,
    make_rollouts,
    plan,
    transformers_logprobs,
)
from tests.ranks import run_ranks

UPDATES = 3
RATE = 1e-4


def _actor(root, topology, dtype):
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.config.sections import OptimizerSection

    # A large epsilon: see test_actor_layouts.
    settings = ActorSettings(
        optimizer=OptimizerSection(learning_rate=RATE, epsilon=1e-3), warmup_updates=0, dtype=dtype
    )
    return MegatronActor(Path(root) / "model", topology=topology, settings=settings)


def _prepare(actor, topology):
    """The minibatch with its frozen behavior log-probs, and these by rollout."""
    from megatron_rl.data.packing import gather_by_rollout

    rollouts, advantages = make_rollouts()
    (minibatch,) = plan(actor, rollouts, advantages, minibatches=1, tokens=240)
    packs = freeze_behavior(actor, [minibatch])
    logprobs = [pack.behavior_logprobs for pack in packs]
    rows = gather_by_rollout(packs, logprobs, count=len(rollouts), topology=topology)
    return minibatch, rows


def _state(actor):
    """This rank's float32 main weights with their moments, and its parameters."""
    from megatron_rl.actor.memory import main_parameters, optimizer_parts

    values = [parameter.detach().clone() for parameter in main_parameters(actor.optimizer)]
    for part in optimizer_parts(actor.optimizer):
        for state in part.optimizer.state.values():
            values += [state[key].clone() for key in ("exp_avg", "exp_avg_sq")]
    return values + [value.clone() for value in actor.named_parameters_local().values()]


def _update(actor, minibatch):
    from megatron_rl.objectives import build_objective

    result = actor.update(minibatch, build_objective("grpo"))
    return result.grad_norm, result.statistics.to_metrics()["ratio/max_deviation"]


def _equal(one, other):
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def _train(actor, minibatch):
    """Metrics of some updates, and the change of each float32 weight of a whole model."""

    def weights():
        parameters = actor.named_parameters_local()
        low = actor.settings.dtype == torch.bfloat16
        return {
            name: (p.main_param.view(p.shape) if low else p).detach().clone()
            for name, p in parameters.items()
        }

    before = weights()
    steps = [_update(actor, minibatch) for _ in range(UPDATES)]
    return steps, {name: value - before[name] for name, value in weights().items()}


def _run(rank, world_size, root):
    from megatron_rl.actor import groups

    root = Path(root)
    topology = groups.initialise(tensor=world_size)
    report, moved = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        actor = _actor(root, topology, dtype)
        minibatch, rows = _prepare(actor, topology)
        steps, moved[dtype] = _train(actor, minibatch)
        report[str(dtype)[6:]] = {"logprobs": [row.tolist() for row in rows], "steps": steps}
    report["moved_otherwise"] = {
        name: ((value - moved[torch.float32][name]).norm() / value.norm()).item()
        for name, value in moved[torch.bfloat16].items()
    }
    report["rounded"] = all(
        p.dtype == torch.bfloat16 and torch.equal(p, p.main_param.view(p.shape).bfloat16())
        for p in actor.named_parameters_local().values()
    )
    report["in_float32"] = all(
        p.main_grad.dtype == p.main_param.dtype == torch.float32
        for p in actor.named_parameters_local().values()
    )
    saved = _state(actor)
    actor.save(root / "checkpoint")
    again = [_update(actor, minibatch)]
    fresh = _actor(root, topology, torch.bfloat16)
    fresh.load(root / "checkpoint")
    report["loaded"] = _equal(_state(fresh), saved)
    fresh.sleep()
    fresh.compute_logprobs(minibatch.micro_batches)
    fresh.wake_up()
    report["woken"] = _equal(_state(fresh), saved)
    again.append(_update(fresh, minibatch))
    report["repeated"] = _equal(_state(fresh), _state(actor)) and again[0] == again[1]
    return json.dumps(report)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model whose weights are exact in bfloat16, stored in float32."""
    folder = tmp_path_factory.mktemp("bfloat16")
    make_model(folder / "model", tied=False)
    file = folder / "model" / "model.safetensors"
    exact = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
    save_file(exact, file, metadata={"format": "pt"})
    return folder


def _gap(one, other):
    pairs = zip(chain(*one), chain(*other), strict=True)
    gaps = [abs(mine - theirs) for mine, theirs in pairs]
    return sum(gaps) / len(gaps)


def test_bfloat16_equals_float32_within_its_precision(root):
    report = json.loads(run_ranks(_run, 2, str(root))[0])
    low, full = report["bfloat16"], report["float32"]

    # The yardstick is transformers in bfloat16, which rounds after the same products; our float32
    # head and accumulation may only help. Two such computations differ by at most both errors.
    theirs, exact = (
        transformers_logprobs(root / "model", x) for x in (torch.bfloat16, torch.float32)
    )
    allowed = _gap(theirs, exact)
    assert 1e-3 < _gap(low["logprobs"], exact) < 1.5 * allowed
    assert _gap(low["logprobs"], theirs) < 2.5 * allowed
    values = torch.tensor(list(chain(*low["logprobs"])))
    assert not torch.equal(values.bfloat16().float(), values)  # float32 to the end

    assert low["steps"][0][1] == full["steps"][0][1] == 0.0  # the first ratio is exactly 1
    assert low["steps"][0][0] == pytest.approx(full["steps"][0][0], rel=0.02)  # gradient norm
    assert report["in_float32"]  # gradients and main weights
    assert report["rounded"]  # the parameters are the main weights, rounded once
    # Three updates of 1e-4 are below bfloat16's spacing of weights near 0.2 (1e-3) and of norms
    # near 1 (8e-3): without main weights most would be lost (1) or rounded up (3 or more). With
    # them what remains is the gradients' own error, some hundredths of them.
    assert max(report["moved_otherwise"].values()) < 0.25

    assert report["loaded"]  # a checkpoint keeps every bit of main weights, moments, parameters
    assert report["woken"]
    assert report["repeated"]
