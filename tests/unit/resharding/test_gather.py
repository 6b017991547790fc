"""Gather-everything on gloo: every rank receives every HF tensor once, bit for bit."""

import torch

from megatron_rl.resharding.layouts import ActorLayout
from tests.cut_shards import cut_shards
from tests.gather_push import distinct_shards, gather_push, gather_tensors, gathered_bytes
from tests.ranks import run_ranks
from tests.unit.resharding.shapes import numbered_tensors, small_shape

LAYOUTS = [ActorLayout(2, 2), ActorLayout(1, 2, 2), ActorLayout(4), ActorLayout(2, data=2)]


class Collector:
    """A receiver that keeps all tensors."""

    layout = "vLLM tp1 x 2 engines"
    dtype = torch.float64

    def __init__(self):
        self.received = {}

    def check_idle(self): ...

    def receive(self, weights, *, version):
        for name, tensor in weights:
            assert name not in self.received, f"{name} came twice"
            self.received[name] = tensor
        return 0.0


def _gather(rank, world_size):
    cases = [(small_shape(tied_embeddings=True), layout) for layout in LAYOUTS]
    cases.append((small_shape("Qwen3MoeForCausalLM"), ActorLayout(2, data=2, expert=2)))
    for shape, layout in cases:
        tensors = {name: tensor.double() for name, tensor in numbered_tensors(shape).items()}
        shards = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
        collector = Collector()
        stats = gather_push(shards, collector, version=1)
        assert collector.received.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(collector.received[name], tensor), (layout, name)
        elements = sum(tensor.numel() for tensor in tensors.values())
        assert stats.bytes_sent == 3 * 8 * elements  # each element to three other ranks
    return True


def test_gather_push_sends_whole_model_to_every_rank():
    assert all(run_ranks(_gather, 4))


def _break(rank, world_size):
    """Return the errors of four syncs, of which the last is valid."""
    shape = small_shape()
    tensors = numbered_tensors(shape)
    errors = []
    for case in ("missing", "extra", "shape", "good"):
        shards = cut_shards(tensors, shape=shape, layout=ActorLayout(tensor=2), rank=rank)
        parameters, layer = shards.parameters, "decoder.layers.2.mlp."
        if rank == 1 and case == "missing":
            del parameters[layer + "linear_fc2.weight"]
        elif rank == 1 and case == "extra":
            parameters[layer + "linear_fc3.weight"] = torch.zeros(2, 2)
        elif rank == 1 and case == "shape":
            parameters[layer + "linear_fc1.weight"] = torch.zeros(23, 20)
        try:
            gather_push(shards, Collector(), version=3)
            errors.append("")
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_gather_push_invalid_parameter_raises_on_every_rank():
    layer = "decoder.layers.2.mlp."
    # 24 feed-forward units in two shards: 12 gate rows and 12 up rows.
    expected = [
        layer + "linear_fc2.weight is missing",
        layer + "linear_fc3.weight (2, 2) is not expected",
        layer + "linear_fc1.weight has shape (23, 20), expected (24, 20)",
    ]
    doing, of = "weight sync 3, actor tp2 to vLLM tp1 x 2 engines: ", "parameters of actor tp2: "
    first, second = run_ranks(_break, 2)
    messages = "OtherRankError: " + doing + "rank 1: ValueError: " + of
    assert first == [*(messages + text for text in expected), ""]
    # The rank with the invalid parameter raises the error itself.
    assert second == [*("ValueError: " + doing + of + text for text in expected), ""]


def test_distinct_shards_contain_every_element_once():
    shape = small_shape("Qwen3MoeForCausalLM", tied_embeddings=True)
    elements = sum(tensor.numel() for tensor in numbered_tensors(shape).values())
    for layout in (ActorLayout(2, 2, 1, 2, expert=2), ActorLayout(1, 2, 2, 1, virtual=2)):
        shards = distinct_shards(shape, layout=layout, fused=True)
        assert sum(piece.size for shard in shards for piece in shard.pieces) == elements
        sent = gathered_bytes(shards, world_size=layout.world_size, dtype=torch.bfloat16)
        assert sent == elements * 2 * (layout.world_size - 1)


def test_gather_push_single_process_needs_no_process_group():
    shape = small_shape()
    tensors = numbered_tensors(shape)
    shards = cut_shards(tensors, shape=shape, layout=ActorLayout(), rank=0)
    gathered = dict(
        gather_tensors(
            shards.parameters,
            shape=shape,
            shards=distinct_shards(shape, layout=ActorLayout(), fused=False),
            dtype=torch.int64,
            device=torch.device("cpu"),
        )
    )
    assert all(torch.equal(gathered[name], tensor) for name, tensor in tensors.items())
