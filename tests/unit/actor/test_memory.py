"""Training state leaves the device through pinned memory, with one wait for all of it.

There is no CUDA here, so a stand-in watches: memory that is asked for pinned is remembered, a copy
that may run concurrently with the host runs when the device is synchronized; others are counted.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_rl.actor.memory import _SLACKS, TrainingState, plan_chunks

CUDA = torch.device("cuda")


class _Device(TorchFunctionMode):
    """CUDA as the host sees it: copies happen later, in order, and who waits is written down."""

    def __init__(self):
        super().__init__()
        self.pinned, self.pending, self.events = [], [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.empty_like):
            pinned = kwargs.pop("pin_memory", False)
            kwargs.pop("device", None)
            made = func(*args, **kwargs).fill_(77)
            if pinned:
                self.pinned.append(made)
                self.events.append("pin")
            return made
        if func is torch.Tensor.copy_:
            if kwargs.get("non_blocking") and sum(map(self.is_pinned, args[:2])) == 1:
                self.pending.append((args[0], args[1].detach()))
                return args[0]
            self.events.append("pageable copy")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            self.events.append("pageable copy")
            return args[0].clone()
        return func(*args, **kwargs)

    def is_pinned(self, tensor):
        place = tensor.data_ptr()
        return any(0 <= place - each.data_ptr() < each.numel() for each in self.pinned)

    def synchronize(self):
        self.events.append("wait")
        self.flush()

    def flush(self):
        for target, source in self.pending:
            target.reshape(-1).view(torch.uint8)[:] = source.reshape(-1).view(torch.uint8)
        self.pending = []


class _Chunk:
    """The part of Megatron's wrapper that frees gradients, of a model without experts."""

    def __init__(self, device):
        self.device = device

    def modules(self):
        return []

    def offload_grad_buffers(self, synchronize=True, empty_cache=True):
        assert not self.device.pending, "freed before the copies were done"
        self.device.events += ["wait"] * synchronize + ["empty"] * empty_cache + ["free"]

    def restore_grad_buffers(self, synchronize=True):
        self.device.events += ["wait"] * synchronize + ["grads"]


def _optimizer(sizes):
    """An optimizer in two parts: bfloat16 moments in one, and a count on the host."""
    parts = []
    for number in range(2):
        kind = (torch.float32, torch.bfloat16)[number]
        main = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        state = {
            each: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn(each.shape).to(kind),
                "exp_avg_sq": torch.randn(each.shape).to(kind),
            }
            for each in main
        }
        parts.append(
            SimpleNamespace(
                shard_fp32_from_float16_groups=[[*main, None]],
                optimizer=SimpleNamespace(state=state),
            )
        )
    return SimpleNamespace(chained_optimizers=parts)


def _tensors(optimizer):
    """Return the tensors of an optimizer without step counts, and the step counts."""
    held, counts = [], []
    for part in optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            held += [main.data, state["exp_avg"], state["exp_avg_sq"]]
            counts.append(state["step"])
    return held, counts


def test_offload_copies_into_memory_pinned_once_and_waits_once(monkeypatch):
    optimizer, device = _optimizer([(5,), (3, 7), (), (2, 2, 4)]), _Device()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.events.append("empty"))
    held, counts = _tensors(optimizer)
    expected, places = [each.clone() for each in held], []
    state = TrainingState([_Chunk(device)] * 2, optimizer, device=CUDA)
    for _ in range(3):
        with device:
            state.offload()
        # Pinned by the first one only; one wait, whatever the number of tensors and chunks.
        assert device.events == ["pin"] * (not places) + ["wait", "free", "free", "empty"]
        asleep, _ = _tensors(optimizer)
        places.append([each.data_ptr() for each in asleep])
        assert all(map(device.is_pinned, asleep)) and places[-1] == places[0]
        assert all(torch.equal(a, b) for a, b in zip(asleep, expected, strict=True))
        device.events.clear()
        with device:
            state.restore()
        assert device.events == ["grads", "grads"]  # in the stream's order, so nobody waits
        device.flush()
        awake, _ = _tensors(optimizer)
        assert not any(map(device.is_pinned, awake))
        assert all(torch.equal(a, b) for a, b in zip(awake, expected, strict=True))
        for each in (*awake, *expected):
            each.add_(1)
        device.events.clear()
    assert all(a is b for a, b in zip(counts, _tensors(optimizer)[1], strict=True))


def test_pinned_memory_is_reallocated_for_other_sizes(monkeypatch):
    device = _Device()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    state = TrainingState([], _optimizer([(5,)]), device=CUDA)
    for other in (state.optimizer, _optimizer([(6,)])):
        state.optimizer = other
        with device:
            state.offload()
    assert device.events == ["pin", "wait", "pin", "wait"]


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 20])
def test_pinned_memory_has_room_for_all_without_overlap(chunk, monkeypatch):
    monkeypatch.setattr("megatron_rl.actor.memory._SMALLEST_CHUNK", chunk)
    device, state = _Device(), TrainingState([], _optimizer([(300,), (1,), (9,)]), device=CUDA)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    with device:
        state.offload()
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in _tensors(state.optimizer)[0])
    assert all(a[1] <= b[0] and b[0] % 4 == 0 for a, b in itertools.pairwise(ranges))
    assert all(map(device.is_pinned, _tensors(state.optimizer)[0]))


# Weights of the first layers, of which a rank of Qwen2.5-32B under data parallel 8 has float32 main
# parameters and two moments: 5120 wide, 27648 inside, 152064 words.
SLICE = [5120, 5120 * 7168, 7168, 5120**2, 5120, 2 * 5120 * 27648, 5120 * 27648] * 7


@pytest.mark.parametrize(
    ("numbers", "most"),
    [
        ([152064 * 5120, *SLICE], 1.01),  # the first rank's: with the embedding, 3.1 GB in float32
        ([17_000_000], 1.34),  # three of 65 MiB: in 256 MiB, not in three times 128
        ([1], float("inf")),
    ],
)
def test_pinned_chunks_are_powers_of_two_and_nearly_full(numbers, most):
    """torch pins the next power of two, so every chunk is one; the best plan is nearly full."""
    sizes = [4 * number for number in numbers for _ in range(3)]
    plans = [plan_chunks(sizes, slack=slack) for slack in _SLACKS]
    for chunks, places in plans:
        assert all(size & (size - 1) == 0 for size in chunks)
        taken = sorted((c, start, start + s) for (c, start), s in zip(places, sizes, strict=True))
        assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(taken))
        assert all(end <= chunks[c] and start % 512 == 0 for c, start, end in taken)
    assert min(sum(chunks) for chunks, _ in plans) <= most * sum(sizes)


def test_offload_without_cuda_frees_only_gradients(monkeypatch):
    optimizer, device = _optimizer([(5,)]), _Device()
    before, _ = _tensors(optimizer)
    state = TrainingState([_Chunk(device)], optimizer, device=torch.device("cpu"))
    with device:
        state.offload()
        state.restore()
    assert device.events == ["free", "grads"]
    after, _ = _tensors(optimizer)
    assert [t.data_ptr() for t in before] == [t.data_ptr() for t in after]
