"""Reading model folders: bad values are refused, and equal ranks read every byte once together."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.actor.weights import HfReader, read_piece
from megatron_rl.resharding.pieces import Piece
from tests.functional.test_actor_architectures import EXPERTS, SIZES
from tests.functional.test_actor_layouts import make_model
from tests.ranks import run_ranks

RANKS = 4
LAYOUTS = {
    "dense": [{"tensor": 2, "context": 2}, {"pipeline": 2}],
    "experts": [{"expert": 2}, {"tensor": 2, "expert": 2}],
}


def test_model_folder_with_non_finite_values_raises(tmp_path):
    tensors = {"good": torch.ones(4, 2), "bad": torch.ones(4, 2)}
    tensors["bad"][3, 1] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert read_piece(reader, piece("good", rows=(0, 4))).shape == (4, 2)
    read_piece(reader, piece("bad", rows=(0, 3)))
    with pytest.raises(ValueError, match=r"model.safetensors: bad has values that are not finite"):
        read_piece(reader, piece("bad", rows=(3, 4)))


def piece(tensor, *, rows):
    return Piece(tensor=tensor, rows=rows, columns=(0, 2), parameter="p")


class CountedReads:
    """Counts the bytes that `read_piece` reads, and fails for one tensor where asked."""

    def __init__(self, fails=None):
        self.bytes, self.fails = 0, fails

    def __call__(self, reader, piece):
        if piece.tensor == self.fails:
            raise OSError("disk on fire")
        values = read_piece(reader, piece)
        self.bytes += values.nbytes
        return values


def load_counted(rank, world_size, root):
    """Load each model under each layout: bytes read, the rank's shard, and whether it is right."""
    from megatron.core import parallel_state

    from megatron_rl.actor import groups, weights
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.reference import ReferencePolicy
    from megatron_rl.actor.settings import ActorSettings
    from megatron_rl.resharding.layouts import layout_of

    report = []
    for model, layouts in LAYOUTS.items():
        for layout in layouts:
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            topology = groups.initialise(**layout)
            with mock.patch.object(weights, "read_piece", CountedReads()) as reads:
                folder = Path(root) / model
                actor = MegatronActor(folder, topology=topology, settings=ActorSettings())
                first = reads.bytes
                same = ReferencePolicy(actor, folder)
                again = reads.bytes - first
            pieces = layout_of(topology).pieces(actor.shape, rank=rank)
            reader, own = HfReader(folder), actor.named_parameters_local()
            for one in pieces:
                wanted = read_piece(reader, one)
                for parameters in (own, same.inactive):
                    assert torch.equal(one.of_parameter(parameters[one.parameter]), wanted), one
            coordinates = layout_of(topology).shard_coordinates(rank)
            sizes = [((one.parameter, *one[:3]), one.size * 4) for one in pieces]
            report.append((first, again, coordinates, sizes))
    bad = CountedReads("model.norm.weight")  # which one rank of each group reads
    with mock.patch.object(weights, "read_piece", bad), pytest.raises(Exception) as error:
        weights.load_weights(own, shape=actor.shape, topology=topology, folder=folder)
    return report, str(error.value)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    import transformers

    root = tmp_path_factory.mktemp("models")
    make_model(root / "dense", tied=False)
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "experts")
    return run_ranks(load_counted, RANKS, str(root))


@pytest.mark.parametrize("index", range(sum(map(len, LAYOUTS.values()))))
def test_equal_ranks_read_every_byte_once_together(loaded, index):
    """Dense weights are equal for equal (stage, tensor) ranks, experts for (stage, expert) ones."""
    wanted = {}
    for _, _, (stage, tensor, expert, in_expert), sizes in (report[index] for report, _ in loaded):
        for rectangle, size in sizes:
            shard = (expert, in_expert) if ".experts." in rectangle[1] else (tensor,)
            wanted[stage, shard, rectangle] = size
    reads = [report[index][0] for report, _ in loaded]
    assert sum(reads) == sum(wanted.values())
    assert max(reads) < 0.6 * sum(reads)
    assert [report[index][1] for report, _ in loaded] == [0] * RANKS  # the reference, once more


def test_error_of_one_reader_is_raised_on_all_ranks(loaded):
    for _, error in loaded:
        assert "disk on fire" in error and "reading " in error
