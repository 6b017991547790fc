"""A planned push on gloo: right slices everywhere, damage and hangs noticed on every rank."""

import contextlib
import json
import time
from pathlib import Path

import torch

from megatron_rl.resharding.architectures import tensor_shapes
from megatron_rl.resharding.exchange import Exchange, ExchangeError
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.resharder import Resharder, ReshardSettings
from tests.cut_shards import cut_shards
from tests.ranks import run_ranks
from tests.unit.resharding.shapes import numbered_tensors, small_shape


class Slices:
    """A receiver that keeps the slices its rank needs, as vLLM's loaders do."""

    def __init__(self, shape, layout, rank, dtype=torch.float32):
        self.layout, self.dtype, self.version = layout, dtype, -1
        self.pieces = layout.pieces(shape, rank=rank)
        self.names = tensor_shapes(shape).keys()
        self.received = {}

    def receive(self, weights, *, version):
        self.received = {}
        by_tensor = {}
        for piece in self.pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        for name, tensor in weights:
            assert name not in self.received, f"{name} came twice"
            own = by_tensor.get(name, [])  # none of a vocabulary's padding
            self.received[name] = [piece.of_tensor(tensor).clone() for piece in own]
        assert self.received.keys() == self.names
        self.version = version
        return 0.0

    def live_parameters(self):
        return None

    def invalidate(self):
        self.version = -1

    def differs_from(self, tensors):
        """Names of tensors of which a slice is not bit for bit that of `tensors`."""
        wrong = set()
        by_tensor = {}
        for piece in self.pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        for name, slices in self.received.items():
            for piece, got in zip(by_tensor.get(name, []), slices, strict=True):
                if not torch.equal(got, piece.of_tensor(tensors[name]).to(self.dtype)):
                    wrong.add(name)
        return sorted(wrong)


class Live(Slices):
    """A receiver whose parameters, laid out as vLLM's, are written directly."""

    def __init__(self, shape, layout, rank, dtype):
        super().__init__(shape, layout, rank, dtype)
        sizes = layout.parameter_shapes(shape, rank=rank)
        self.live = {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}

    def live_parameters(self):
        return self.live

    def overwrite(self, write, *, version):
        write()
        self.version = version
        self.received = {}
        for piece in self.pieces:
            found = piece.of_parameter(self.live[piece.parameter])
            self.received.setdefault(piece.tensor, []).append(found)
        return 0.0


CASES = [  # actor (tensor, pipeline, context, data, virtual, expert), vLLM tensor
    ((4, 1, 1, 1), 1),
    ((2, 2, 1, 1), 2),
    ((1, 2, 1, 2), 4),
    ((1, 1, 2, 2), 2),
    ((1, 2, 2, 1, 2), 1),
    ((2, 1, 1, 2, 1, 2), 2),
]


def _values(shape, version):
    """Numbers that float32 and bfloat16 keep exactly or round alike, new with each version."""
    tensors = numbered_tensors(shape)
    return {name: (tensor + 977 * version).float() for name, tensor in tensors.items()}


def _push_all(rank, world_size):
    for number, (sizes, engine_tensor) in enumerate(CASES):
        layout = ActorLayout(*sizes)
        architecture = "Qwen3MoeForCausalLM" if layout.expert > 1 else "Qwen2ForCausalLM"
        shape = small_shape(architecture, tied_embeddings=number % 2 == 1)
        dtype = torch.bfloat16 if number % 3 == 2 else torch.float32
        kind = Live if number in (1, 2, 5) else Slices
        receiver = kind(shape, EngineLayout(engine_tensor, world_size), rank, dtype)
        resharder = Resharder(receiver, ReshardSettings(bucket_bytes=3000, full_check_every=2))
        for version in range(3):
            tensors = _values(shape, version)
            shards = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
            stats = resharder.push(shards, version=version)
            assert receiver.differs_from(tensors) == [] and receiver.version == version
        if sizes == (2, 2, 1, 1):  # each rank has one of two stages of the right tensor shard
            elements = sum(tensor.numel() for tensor in tensors.values())
            assert 0 < stats.bytes_sent <= 4 * elements * 4 / 4 + 4 * 4 * 20 * 9 + 4 * 20 * 64
    return resharder.repairs


def test_every_rank_gets_its_slices_in_the_engines_dtype():
    assert run_ranks(_push_all, 4) == [0, 0, 0, 0]


class _Damaging(Exchange):
    """Changes one element of what rank 1 receives, after it came off the wire."""

    tensor = "model.layers.1.mlp.down_proj.weight"
    after_checksum = False

    def _unpack(self, flight):
        if not self.after_checksum:
            for of, copies in self.plan.rounds[flight.number].receives.items():
                at = 0
                for copy in copies:
                    if copy.tensor == self.tensor and self.plan.rank == 1:
                        flight.received[of][at] += 1
                    at += copy.size
        super()._unpack(flight)
        if self.after_checksum and self.plan.rank == 1 and self.tensor in self._open:
            self._open[self.tensor].zero_()


class Busy(Slices):
    """An engine that refuses: before it takes anything, or after some tensors."""

    def receive(self, weights, *, version):
        for _ in range(3 if version == 2 else 0):
            next(weights)
        raise RuntimeError("the engine is generating")


def _refuse(shape, shards, rank):
    """What each rank is told when the engine of rank 1 refuses, and how long that takes."""
    told, start = [], time.monotonic()
    kind = Busy if rank == 1 else Slices
    resharder = Resharder(kind(shape, EngineLayout(1, 2), rank), ReshardSettings(bucket_bytes=999))
    for version in (1, 2):
        try:
            resharder.push(shards, version=version)
        except RuntimeError as error:
            told.append(str(error))
    return told, time.monotonic() - start


def _damage(rank, world_size):
    import megatron_rl.resharding.resharder as module

    shape, layout = small_shape(), ActorLayout(1, 2)
    tensors = _values(shape, 0)
    shards = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
    told = [_refuse(shape, shards, rank)]
    module.Exchange = _Damaging
    for after_checksum, full_every, repair in (
        (False, 0, False),  # on the wire: the message's checksum sees it in every push
        (True, 1, False),  # in the wrong place afterwards: a full check sees it
        (False, 0, True),
    ):
        _Damaging.after_checksum = after_checksum
        receiver = Slices(shape, EngineLayout(1, 2), rank)
        resharder = Resharder(receiver, ReshardSettings(full_check_every=full_every, repair=repair))
        resharder._pushes = 1  # not the first push, which is checked in full anyway
        try:
            stats = resharder.push(shards, version=5)
            told.append((stats.repairs, receiver.version, receiver.differs_from(tensors)))
        except RuntimeError as error:
            told.append((str(error), receiver.version))
    return told


def test_a_damaged_slice_is_named_on_every_rank_and_stops_or_is_repaired():
    for (refused, seconds), message, full, repaired in run_ranks(_damage, 2):
        assert len(refused) == 2 and seconds < 30
        assert all(text.endswith("rank 1: the engine is generating") for text in refused)
        start = "weight push 5, actor tp1 pp2 to vLLM tp1 x 2 engines: checksums differ"
        assert message[0].startswith(start) and full[0].startswith(start)
        # A message's checksum names all tensors of the message, a slice's only its own.
        assert full[0].endswith("for model.layers.1.mlp.down_proj.weight")
        assert message[1] == full[1] == -1, "an engine with damaged weights must not generate"
        assert repaired == (1, 5, [])


class _Stuck(Exchange):
    """Rank 1 does not come to the exchange until the others have given up."""

    folder: Path

    def _launch(self, number):
        if self.plan.rank == 1:
            _wait_for_reports(self.folder)
        super()._launch(number)


def _wait_for_reports(folder):
    deadline = time.monotonic() + 60
    while not all((folder / f"{rank}.json").exists() for rank in (0, 2)):
        assert time.monotonic() < deadline, "ranks 0 and 2 have not given up"
        time.sleep(0.02)


def _hang(rank, world_size, folder):
    import megatron_rl.resharding.resharder as module

    shape = small_shape(num_attention_heads=6, num_query_groups=3)
    shards = cut_shards(_values(shape, 0), shape=shape, layout=ActorLayout(tensor=3), rank=rank)
    receiver = Slices(shape, EngineLayout(1, 3), rank)
    resharder = Resharder(receiver, ReshardSettings(time_limit=1.0))
    resharder.push(shards, version=0)
    module.Exchange, _Stuck.folder = _Stuck, folder
    try:
        resharder.push(shards, version=1)
    except ExchangeError as error:
        told = json.dumps([str(error), receiver.version])
        (folder / f"{rank}.partial").write_text(told)
        (folder / f"{rank}.partial").rename(folder / f"{rank}.json")
        _wait_for_reports(folder)  # the connections are gone: whoever ends first ends the test


def test_a_rank_that_hangs_is_an_error_on_the_others(tmp_path):
    with contextlib.suppress(AssertionError):  # the connections are gone; goodbyes fail
        run_ranks(_hang, 3, tmp_path)
    for rank in (0, 2):
        message, version = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "round 1 of" in message and "within 1 s" in message
        assert version == -1
