"""Checkpoints that every rank writes and reads a share of, under layouts that change between.

Moments of random bits stand for a training of any length. Megatron-core's own way of the same
format, which gathers whole tensors, is the second computation: either reads the other's files.
"""

import contextlib
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.functional.test_actor_architectures import EXPERTS, SIZES
from tests.ranks import run_ranks

RANKS = 4
# The model, and the layouts that its checkpoint goes through; the last one is the first again.
WAYS = {
    "qwen2": [{}, {"tensor": 2, "pipeline": 2}, {"context": 2}, {}],
    "qwen3_moe": [{"expert": 2}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 2},
                  {"expert": 2}],
}  # fmt: skip


def _make_models(root):
    import transformers

    wide = {**SIZES, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    for name, kind, extra in (
        ("qwen2", "Qwen2Config", {"vocab_size": 4099, "head_dim": 16}),
        ("qwen3_moe", "Qwen3MoeConfig", EXPERTS),
    ):
        torch.manual_seed(7)
        config = getattr(transformers, kind)(**{**wide, **extra})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)


def _fill_with_noise(actor):
    """Weights, main weights and moments of this rank, as no other rank has them."""
    from megatron_rl.actor.digest import training_state

    generator = torch.Generator().manual_seed(actor.topology.rank)
    state = training_state([], actor.optimizer)
    with torch.no_grad():
        for tensor in state:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


@contextlib.contextmanager
def megatrons_own_way():
    """Save as Megatron-core does: the optimizer gathered, one writer for each shard.

    In format 1, whose keys depend on an optimizer of its own for the experts.
    """
    from megatron_rl.actor import checkpoint
    from megatron_rl.runtime import versions

    own = functools.partial(checkpoint._sharded_state, written_format=1)
    with (
        mock.patch.object(checkpoint, "sliced_optimizers", contextlib.nullcontext),
        mock.patch.object(checkpoint, "_sharded_state", own),
        mock.patch.object(versions, "FORMAT", 1),
    ):
        yield


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _actor(model, layout, dtype):
    from megatron.core import parallel_state

    from megatron_rl.actor import groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    topology = groups.initialise(**layout)
    settings = ActorSettings(warmup_updates=0, dtype=dtype)
    return MegatronActor(model, topology=topology, settings=settings)


def _walk(rank, world_size, root):
    """Take each model's checkpoint through its layouts; what the way back finds."""
    report = {}
    for name, layouts in WAYS.items():
        folder = Path(root) / f"{name}-checkpoints"
        actor = _actor(Path(root) / name, layouts[0], torch.bfloat16)
        _fill_with_noise(actor)
        first = actor.digest()
        actor.save(folder / "0")
        with megatrons_own_way():
            actor.save(folder / "own")
        digests = []
        for number, layout in enumerate(layouts[1:], start=1):
            actor = _actor(Path(root) / name, layout, torch.bfloat16)
            empty = actor.digest()
            actor.load(folder / str(number - 1))
            digests.append(actor.digest())
            if number == 1:
                other = _actor(Path(root) / name, layout, torch.bfloat16)
                other.load(folder / "own")
                report[name, "own way"] = other.digest() == digests[0] != empty
            actor.save(folder / str(number))
        report[name, "way back"] = digests[-1] == first
        before = _bytes_read()
        actor.load(folder / "0")
        report[name, "read"] = _bytes_read() - before
    return report


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    _make_models(folder)
    return folder


@pytest.fixture(scope="module")
def reports(root):
    return run_ranks(_walk, RANKS, str(root))


@pytest.mark.parametrize("model", WAYS)
def test_checkpoint_is_bit_identical_through_other_layouts_and_back(reports, model):
    """And so is one that Megatron itself has written."""
    for what in ("way back", "own way"):
        assert [report[model, what] for report in reports] == [True] * RANKS, what


def test_every_rank_writes_and_reads_its_share(root, reports):
    """Data parallel over all ranks: a quarter each, besides the small table of the checkpoint."""
    files = (root / "qwen2-checkpoints" / "0").glob("*.distcp")
    written = {file.name: file.stat().st_size for file in files}
    whole = sum(written.values())
    for rank, report in enumerate(reports):
        own = sum(size for name, size in written.items() if name.startswith(f"__{rank}_"))
        assert 0.2 * whole < own < 0.3 * whole
        assert report["qwen2", "read"] < 0.6 * whole
