"""On CUDA a transfer blocks the host once, and sends one message per peer and round.

Tensors on the meta device have no values: reading one raises where CUDA would wait. A fake
transport accepts the messages and records the waits.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.models.shape import tensor_shapes
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.pieces import parameter_shapes
from megatron_rl.resharding.push_schedule import plan_for_rank
from megatron_rl.resharding.transfer import (
    Assembly,
    ExchangeError,
    Ledger,
    Overwriting,
    slice_checksum,
)
from tests.unit.resharding.shapes import small_shape

META = torch.device("meta")
SHAPE, ACTOR, ENGINES = small_shape(), ActorLayout(1, 2, 1, 2), EngineLayout(1, 4)


class _Stream:
    """Fake CUDA events: each completes after enough queries by the host."""

    def __init__(self, asked=3):
        self.groups, self.waits, self.queries, self.asked = [], [], 0, asked

    def batch_isend_irecv(self, operations):
        self.groups.append(operations)
        return [SimpleNamespace(wait=lambda *limit: self.waits.append(limit)) for _ in operations]

    def event(self):
        return SimpleNamespace(record=lambda: None, query=self.query)

    def query(self):
        self.queries += 1
        return self.queries >= self.asked


def _transfer(monkeypatch, stream, *, rank, full, live, time_limit=60.0, engines=ENGINES):
    for name in ("batch_isend_irecv", "isend", "irecv"):
        monkeypatch.setattr(dist, name, getattr(stream, name, name))
    monkeypatch.setattr(dist, "P2POp", lambda kind, wire, peer: (kind, wire, peer))
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    plan = plan_for_rank(
        SHAPE, ACTOR, engines, rank=rank, wire_elements=1500, ranks_per_node=2,
        tensor_elements=None if live else 3000,
    )  # fmt: skip
    held = parameter_shapes(ACTOR.pieces(SHAPE, rank=rank))
    needed = engines.parameter_shapes(SHAPE, rank=rank) if rank in engines.ranks else {}
    empty = {name: torch.empty(size, device=META) for name, size in held.items()}
    common = {
        "plan": plan,
        "parameters": empty,
        "dtype": torch.bfloat16,
        "device": META,
        "ledger": Ledger(plan, full=full, dtype=torch.bfloat16, device=META),
        "time_limit": time_limit,
    }
    if not live:
        return Assembly(**common, shapes=tensor_shapes(SHAPE))
    memory = {n: torch.empty(s, device=META, dtype=torch.bfloat16) for n, s in needed.items()}
    return Overwriting(**common, live=memory)


@pytest.mark.parametrize(
    ("full", "live"), [(False, True), (True, False)], ids=["messages, direct", "full, loaders"]
)
def test_transfer_on_cuda_blocks_host_only_at_end(full, live, monkeypatch):
    stream = _Stream()
    push = _transfer(monkeypatch, stream, rank=1, full=full, live=live)
    if live:
        push.write()
    else:
        assert sum(1 for _ in push.tensors()) == len(tensor_shapes(SHAPE))
    rounds = push.plan.rounds
    assert len(rounds) > 5 and stream.waits and set(stream.waits) == {()}, "a time limit blocks"
    # No event is queried before the last round is launched; after three queries all are done.
    assert stream.queries == 2 + sum(1 for part in rounds if part.sends or part.receives) + sum(
        1 for part in rounds if any(m.to or m.sender != m.source for m in part.receives)
    )
    # One operation for each peer of a message.
    expected = sum(
        len(m.to) + (m.source != push.plan.rank)
        for part in rounds
        for m in (*part.sends, *part.receives)
    )
    assert sum(map(len, stream.groups)) == expected
    with pytest.raises(NotImplementedError):
        push.changed()  # the only call that reads from the device; meta tensors cannot be read


def test_transfer_timeout_on_cuda_names_round(monkeypatch):
    push = _transfer(
        monkeypatch, _Stream(asked=10**9), rank=3, full=False, live=True, time_limit=0.01
    )
    with pytest.raises(ExchangeError) as error:
        push.write()
    message = str(error.value)
    assert message.startswith(f"round 1 of {len(push.plan.rounds)} (model.")
    assert "did not finish on rank 3 within 0.01 s of its start" in message


def test_transfer_timeout_of_rank_that_only_sends_names_receivers(monkeypatch):
    push = _transfer(
        monkeypatch, _Stream(asked=10**9), rank=0, full=False, live=True, time_limit=0.01,
        engines=EngineLayout(1, 2, first=4),
    )  # fmt: skip
    receivers = sorted({to for message in push.plan.rounds[0].sends for to in message.to})
    with pytest.raises(ExchangeError) as error:
        push.drain()
    start = f"round 1 of {len(push.plan.rounds)} (to ranks {receivers}) of the weight exchange"
    assert receivers and set(receivers) <= {4, 5} and str(error.value).startswith(start)


class _Kernels(TorchDispatchMode):
    """Count of operations that run as kernels on a device: no views, no allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def test_slice_checksum_uses_few_kernels():
    """Check feed-forward slices [4736, 3584] of a 7B model at tensor 4: 17 million elements."""
    matrix = torch.empty(4736, 3584, dtype=torch.bfloat16, device=META)
    with _Kernels() as kernels:
        slice_checksum(matrix)
    # Two blocks; 260 blocks of 64 Ki elements each took 2,087 kernels.
    assert kernels.count <= 25
