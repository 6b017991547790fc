"""Planned weight transfer on gloo: correct slices, and errors on every rank for faults."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

from megatron_rl.config.sections import ReshardingSection
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.resharding import push_schedule
from megatron_rl.resharding.layouts import ActorLayout, EngineLayout
from megatron_rl.resharding.push import Resharder
from megatron_rl.resharding.transfer import Assembly, ExchangeError, Overwriting, check_parameters
from tests.cut_shards import cut_shards
from tests.ranks import run_ranks
from tests.unit.resharding.shapes import numbered_tensors, small_shape


class Slices:
    """A receiver that keeps the slices its rank needs, like vLLM's loaders."""

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
            own = by_tensor.get(name, [])  # none for padding of the vocabulary
            self.received[name] = [piece.of_tensor(tensor).clone() for piece in own]
        assert self.received.keys() == self.names
        self.version = version
        return 0.0

    def check_idle(self): ...

    def live_parameters(self):
        return None

    def invalidate(self):
        self.version = -1

    def differs_from(self, tensors):
        """Return the names of tensors with a slice that differs from `tensors`."""
        wrong = set()
        by_tensor = {}
        for piece in self.pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
        for name, slices in self.received.items():
            for piece, got in zip(by_tensor.get(name, []), slices, strict=True):
                dtype = torch.float32 if name.endswith(FROZEN) else self.dtype
                if not torch.equal(got.to(dtype), piece.of_tensor(tensors[name]).to(dtype)):
                    wrong.add(name)
        return sorted(wrong)


class Live(Slices):
    """A receiver with vLLM's parameter layout, written directly."""

    def __init__(self, shape, layout, rank, dtype):
        super().__init__(shape, layout, rank, dtype)
        sizes = layout.parameter_shapes(shape, rank=rank)
        self.live = {
            # As in vLLM, routers are in float32 whatever the dtype of the engine.
            name: torch.zeros(size, dtype=torch.float32 if ".gate." in name else dtype)
            for name, size in sizes.items()
        }

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


CASES = [  # actor (tensor, pipeline, context, data, virtual, expert), vLLM tensor, ranks per node
    ((2, 2, 1, 1), 2, 2, Live, torch.float32),
    ((1, 2, 1, 2), 4, 1, Slices, torch.bfloat16),
    ((1, 2, 2, 1, 2), 1, 2, Slices, torch.float32),
    ((2, 1, 1, 2, 1, 2), 2, 1, Live, torch.bfloat16),
]
FROZEN = "e_score_correction_bias"  # arrives in float32


PHASES = ("plan", "pack", "transfer", "unpack", "load", "cache_reset", "verify")
METRICS = ["seconds", "bytes_sent", "bytes_local", "gigabytes_per_second"]
METRICS += [f"{phase}_seconds" for phase in PHASES]


def _values(shape, version):
    """Return numbers that are different in each version; bfloat16 rounds most of them."""
    tensors = numbered_tensors(shape)
    return {name: (tensor + 977 * version).float() for name, tensor in tensors.items()}


def _push_all(rank, world_size):
    push_schedule.SOURCES_AT_ONCE = push_schedule.NODES_OF_SHARE = 1  # experts of Live in shares
    for number, (sizes, engine_tensor, node, kind, dtype) in enumerate(CASES):
        layout = ActorLayout(*sizes)
        architecture = "Glm4MoeForCausalLM" if layout.expert > 1 else "Qwen2ForCausalLM"
        shape = small_shape(architecture, tied_embeddings=number % 2 == 1)
        receiver = kind(shape, EngineLayout(engine_tensor, world_size), rank, dtype)
        settings = ReshardingSection(bucket_mib=6000 / 2**20)
        resharder = Resharder(receiver, settings, node, full_check_every=2)
        for version in range(2):
            tensors = _values(shape, version)
            shards = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
            stats = resharder.push(shards, version=version)
            assert receiver.differs_from(tensors) == [] and receiver.version == version
        assert {f"sync/{name}" for name in METRICS} == stats.to_metrics().keys()
        if sizes == (2, 2, 1, 1):  # each rank has one of two stages of the right tensor shard
            elements = sum(tensor.numel() for tensor in tensors.values())
            assert 0 < stats.bytes_sent <= 4 * elements * 4 / 4 + 4 * 4 * 20 * 9 + 4 * 20 * 64
    return _memory(rank)


@pytest.fixture(scope="module")
def peaks():
    """Bytes of each rank's buffers in pushes, after pushes of all cases that are checked there."""
    return run_ranks(_push_all, 4)


def test_push_delivers_slices_in_engine_dtype(peaks):
    assert len(peaks) == 4


class _Damaging(Assembly):
    """Change one element of a tensor that rank 1 receives, after its arrival."""

    tensor = "model.layers.1.mlp.down_proj.weight"
    after_checksum = False

    def _open_parcels(self, flight):
        for parcel in flight.received if not self.after_checksum else ():
            for run, matrices in parcel.runs():
                for each, matrix in zip(parcel.message.slices[run.first :], matrices, strict=False):
                    if each.tensor == self.tensor and self.plan.rank == 1:
                        matrix[0, 0] += 1
        return super()._open_parcels(flight)

    def _unpack(self, parts):
        super()._unpack(parts)
        if self.after_checksum and self.plan.rank == 1 and self.tensor in self._open:
            self._open[self.tensor].zero_()


class Refusing(Slices):
    """An engine that fails before the transfer, before the first tensor, or after some."""

    when = ""

    def check_idle(self):
        if self.when == "generating":
            raise RuntimeError("the engine is generating")

    def receive(self, weights, *, version):
        if not self.when:
            return super().receive(weights, version=version)
        for _ in range(3 if self.when == "halfway" else 0):
            next(weights)
        raise KeyError("no such parameter")


def _refuse(shape, shards, rank):
    """Return each rank's errors and versions when the engine of rank 1 fails."""
    messages = []
    receiver = Refusing(shape, EngineLayout(1, 2), rank)
    resharder = Resharder(receiver, ReshardingSection(bucket_mib=4000 / 2**20))
    for version, when in enumerate(("", "generating", "", "at once", "", "halfway")):
        receiver.when = when if rank == 1 else ""
        try:
            resharder.push(shards, version=version)
        except (RuntimeError, KeyError) as error:
            messages.append((type(error).__name__, error.args[0], receiver.version))
    return messages


def _damage(rank, world_size):
    import megatron_rl.resharding.push as module

    shape, layout = small_shape(), ActorLayout(1, 2)
    tensors = _values(shape, 0)
    shards = cut_shards(tensors, shape=shape, layout=layout, rank=rank)
    _mixed_ways(shape, shards, tensors, rank)
    messages = [_refuse(shape, shards, rank)]
    module.Assembly = _Damaging
    for after_checksum, full_every in (
        (False, 50),  # on the wire: the message checksum detects it in every sync
        (True, 1),  # wrong position after arrival: a full check detects it
    ):
        _Damaging.after_checksum = after_checksum
        receiver = Slices(shape, EngineLayout(1, 2), rank)
        resharder = Resharder(receiver, full_check_every=full_every)
        resharder._pushes = 1  # not the first one, which is always checked in full
        with pytest.raises(RuntimeError) as error:
            resharder.push(shards, version=5)
        messages.append((str(error.value), receiver.version))
    return messages


def test_push_changed_slice_raises_on_every_rank_with_its_name():
    messages = run_ranks(_damage, 2)
    for rank, (refused, message, full) in enumerate(messages):
        pair = "actor tp1 pp2 to vLLM tp1 x 2 engines: "
        busy, key = "the engine is generating", "no such parameter"
        # The failing rank raises the error itself. If an engine is generating, all engines keep
        # their weights; if one was partly written, none may generate.
        if rank == 1:
            expected = [("RuntimeError", f"weight sync 1, {pair}{busy}", 0)]
            expected += [("KeyError", f"weight sync {v}, {pair}{key}", -1) for v in (3, 5)]
        else:
            expected = [("OtherRankError", f"weight sync 1, {pair}rank 1: RuntimeError: {busy}", 0)]
            messages = f"{pair}rank 1: KeyError: '{key}'"
            expected += [("OtherRankError", f"weight sync {v}, {messages}", -1) for v in (3, 5)]
        assert refused == expected
        start = "weight sync 5, actor tp1 pp2 to vLLM tp1 x 2 engines: checksums differ"
        assert message[0].startswith(start) and full[0].startswith(start)
        # A message checksum names all tensors of the message, a slice checksum only its own.
        assert message[0].endswith(" more")
        assert full[0].endswith("for model.layers.1.mlp.down_proj.weight")
        assert message[1] == full[1] == -1, "an engine with damaged weights must not generate"


class _Stuck(Assembly):
    """Rank 1 joins the exchange only after the others have failed, or dies in it."""

    folder: Path
    dies = False

    def _launch(self, number):
        if self.plan.rank == 1:
            if self.dies:
                os._exit(1)
            _wait_for_reports(self.folder)
        super()._launch(number)


def _wait_for_reports(folder):
    deadline = time.monotonic() + 60
    while not all((folder / f"{rank}.json").exists() for rank in (0, 2)):
        assert time.monotonic() < deadline, "ranks 0 and 2 have not given up"
        time.sleep(0.02)


def _hang(rank, world_size, folder, dies):
    import megatron_rl.resharding.push as module

    shape = small_shape(num_attention_heads=6, num_query_groups=3)
    shards = cut_shards(_values(shape, 0), shape=shape, layout=ActorLayout(tensor=3), rank=rank)
    receiver = Slices(shape, EngineLayout(1, 3), rank)
    resharder = Resharder(receiver, ReshardingSection(time_limit_seconds=60.0))
    resharder.push(shards, version=0)
    if not dies:  # only now: a slow machine may need longer for a successful transfer
        resharder.settings = ReshardingSection(time_limit_seconds=2.0)
    module.Assembly, _Stuck.folder, _Stuck.dies = _Stuck, folder, dies
    try:
        resharder.push(shards, version=1)
    except ExchangeError as error:
        messages = json.dumps([str(error), receiver.version])
        (folder / f"{rank}.partial").write_text(messages)
        (folder / f"{rank}.partial").rename(folder / f"{rank}.json")
        _wait_for_reports(folder)  # connections are closed: the first process to exit ends the test


@pytest.mark.parametrize("dies", [False, True], ids=["hangs", "dies"])
def test_push_hanging_or_dead_rank_raises_on_others(dies, tmp_path):
    with contextlib.suppress(AssertionError):  # connections are closed, so shutdown fails
        run_ranks(_hang, 3, tmp_path, dies)
    for rank in (0, 2):
        message, version = json.loads((tmp_path / f"{rank}.json").read_text())
        assert message.startswith("weight sync 1, actor tp3 to vLLM tp1 x 3 engines: round 1 of ")
        assert "model.layers.0.self_attn.q_proj.weight" in message
        assert f"from ranks {[other for other in range(3) if other != rank]})" in message
        assert f"on rank {rank} within {60 if dies else 2} s of its start, or another" in message
        assert version == -1, "a half-updated engine must not go on"
        # The connection fails when a rank dies, before the limit of 60 seconds has passed.
        assert ("Timed out" in message) is not dies, message


def _memory(rank):
    """Return the peak bytes of messages and open tensors, through loaders and direct."""
    shape, layout = small_shape(num_layers=8), ActorLayout(2, 2)
    shards = cut_shards(_values(shape, 0), shape=shape, layout=layout, rank=rank)
    peaks = []
    for receiver, transfer in ((Slices, Assembly), (Live, Overwriting)):
        held = []

        def watched(self, parcel, held=held, inner=transfer._pack):
            tensors = [*self._buffers, *getattr(self, "_open", {}).values()]
            held.append(sum(tensor.nbytes for tensor in tensors))
            inner(self, parcel)

        transfer._pack = watched
        engine = receiver(shape, EngineLayout(1, 4), rank, torch.float32)
        Resharder(engine, ReshardingSection(bucket_mib=8000 / 2**20)).push(shards, version=0)
        peaks.append(max(held))
    return peaks


def test_push_memory_is_at_most_two_buckets(peaks):
    """Buckets have 8,000 bytes, the model some 100,000; messages are padded to 8 numbers."""
    for loaders, direct in peaks:
        assert 4000 < loaders <= 16000 and 8000 < direct <= 16000 + 256


def _mixed_ways(shape, shards, tensors, rank):
    """Sync where only rank 0's parameters allow direct writes."""
    receiver = (Live, Slices)[rank](shape, EngineLayout(1, 2), rank, torch.float32)
    Resharder(receiver, ReshardingSection(bucket_mib=4000 / 2**20)).push(shards, version=0)
    assert receiver.differs_from(tensors) == [], "all ranks use loaders if one must"


def test_parameters_that_differ_from_their_layout_are_named():
    """24 feed-forward units in two shards: 12 gate rows and 12 up rows."""
    shape, layout = small_shape(), ActorLayout(tensor=2)
    tensors = numbered_tensors(shape)
    parameters = cut_shards(tensors, shape=shape, layout=layout, rank=1).parameters
    layer = "decoder.layers.2.mlp."
    del parameters[layer + "linear_fc2.weight"]
    parameters[layer + "linear_fc3.weight"] = torch.zeros(2, 2)
    parameters[layer + "linear_fc1.weight"] = torch.zeros(23, 20)
    with pytest.raises(ValueError) as error:
        check_parameters(parameters, layout.pieces(shape, rank=1), layout=layout)
    assert str(error.value) == (
        f"parameters of actor tp2: {layer}linear_fc1.weight has shape (23, 20), expected (24, 20); "
        f"{layer}linear_fc2.weight is missing; {layer}linear_fc3.weight (2, 2) is not expected"
    )
