"""The reference policy gives another model's log-probs and leaves the policy unchanged."""

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.actor import reference as reference_module
from megatron_rl.actor.reference import swap, swap_through_streams
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
    # A reference of another shape is a model of its own, and leaves the policy as it is.
    smaller = MegatronActor(root / "smaller", topology=topology, settings=ActorSettings())
    reference = ReferencePolicy(policy, root / "smaller")
    scored = reference.compute_logprobs(packs), smaller.compute_logprobs(packs)
    assert all(torch.equal(*pair) for pair in zip(*scored, strict=True))
    assert all(torch.equal(*pair) for pair in zip(policy.compute_logprobs(packs), own, strict=True))
    return "done"


def test_reference_scores_and_restores_policy(tmp_path):
    make_model(tmp_path / "policy", tied=False)
    make_model(tmp_path / "other", tied=False, seed=4)
    make_model(tmp_path / "smaller", tied=True, seed=4, layers=2)
    assert run_ranks(score_by_reference, 2, tmp_path) == ["done", "done"]


class Device(TorchDispatchMode):
    """Streams that execute copies in any order that their events allow.

    A copy is queued in the current stream and executed by `run`, which takes the next command of a
    stream that need not wait: of a random one, or of the first in `preferred`.
    """

    def __init__(self):
        super().__init__()
        self.queues, self.recorded = [], set()
        self.current = self.stream()

    def stream(self):
        self.queues.append([])
        return Stream(self, len(self.queues) - 1)

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is not torch.ops.aten.copy_.default:
            return function(*arguments, **(options or {}))
        target, source, *_ = arguments
        self.current.queue.append(partial(target.copy_, source))
        return target

    def run(self, choose):
        while any(self.queues):
            ready = [queue for queue in self.queues if queue and self._is_ready(queue[0])]
            command = choose(ready).pop(0)
            if callable(command):
                command()
            elif command[0] == "record":
                self.recorded.add(command[1])

    def _is_ready(self, command):
        return callable(command) or command[0] == "record" or command[1] in self.recorded


class Stream:
    """One stream of `Device`, with the methods of torch's."""

    def __init__(self, device, number):
        self.device, self.number = device, number

    @property
    def queue(self):
        return self.device.queues[self.number]

    def record_event(self):
        event = object()
        self.queue.append(("record", event))
        return event

    def wait_event(self, event):
        self.queue.append(("wait", event))

    def wait_stream(self, other):
        self.wait_event(other.record_event())


def queue_exchange(monkeypatch, pairs, swapping=swap_through_streams):
    """Queue the exchange after another write of the parameters; (device, copies of results)."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "stream", device.use)
    with device:
        for active, _ in pairs:
            active.copy_(active + 1)  # the last work of the current stream
        swapping(pairs)
        results = [torch.empty_like(active) for active, _ in pairs]
        for result, (active, _) in zip(results, pairs, strict=True):
            result.copy_(active)  # the next work of the current stream
    return device, results


def make_pairs():
    sizes = [5, 3, 8, 1, 8, 2, 7]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [
        (torch.arange(end - size, end).float(), -torch.arange(end - size, end).float())
        for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize("order", ["first", "last", *range(10)])
def test_streams_exchange_pairs_in_every_order(monkeypatch, order):
    choices = {"first": lambda ready: ready[0], "last": lambda ready: ready[-1]}
    choose = choices.get(order) or random.Random(order).choice
    pairs, expected = make_pairs(), make_pairs()
    for active, _ in expected:
        active.add_(1)
    swap(expected)
    device, results = queue_exchange(monkeypatch, pairs)
    device.run(choose)
    for result, mine, other in zip(results, pairs, expected, strict=True):
        assert all(map(torch.equal, mine, other)) and torch.equal(result, other[0])


def elapsed(device, host):
    """Time of all queued work, if a copy from or to a `host` tensor takes 1 and others nothing."""
    queues, recorded = [list(queue) for queue in device.queues], {}
    times = [0] * len(queues)
    while any(queues):
        for number, queue in enumerate(queues):
            while queue and (callable(queue[0]) or queue[0][0] == "record" or
                             queue[0][1] in recorded):  # fmt: skip
                command = queue.pop(0)
                if callable(command):
                    tensors = command.func.__self__, *command.args
                    times[number] += any(each.data_ptr() in host for each in tensors)
                elif command[0] == "record":
                    recorded[command[1]] = times[number]
                else:
                    times[number] = max(times[number], recorded[command[1]])
    return max(times)


def test_copies_to_host_overlap_with_copies_from_it(monkeypatch):
    """Seven pairs: seven copies up, and the last pair's way down; one after the other, 14."""
    pairs = make_pairs()
    for swapping, time in ((swap_through_streams, len(pairs) + 1), (swap, 2 * len(pairs))):
        device = queue_exchange(monkeypatch, pairs, swapping)[0]
        assert elapsed(device, {inactive.data_ptr() for _, inactive in pairs}) == time


def test_pieces_cover_parameter(monkeypatch):
    monkeypatch.setattr(reference_module, "PIECE", 16)
    pieces = [*reference_module._pieces(torch.arange(11.0).view(11, 1))]
    assert [len(piece) for piece in pieces] == [4, 4, 3]
    assert torch.cat(pieces).tolist() == [*range(11)]
