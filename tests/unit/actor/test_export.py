"""Export by several writers: the same tensors, progress while waiting, and no half folder."""

import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.test_actor_architectures import EXPERTS, SIZES
from tests.functional.test_actor_layouts import make_model
from tests.ranks import run_ranks, start_process

RANKS = 4
LAYOUTS = (("dense", {"tensor": 2, "pipeline": 2}), ("experts", {"tensor": 2, "expert": 2}))
BEATS = 3


def small_files():
    """Several files with several buckets each, some tensors in more than one bucket."""
    from megatron_rl.actor import export

    return mock.patch.multiple(export, SHARD_BYTES=12_000, BUCKET_BYTES=2_000, MAX_WRITERS=3)


def make_folders(root):
    """A dense model and one of experts."""
    import transformers

    make_model(root / "dense", tied=False)
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "experts")


def export_all(rank, world_size, root):
    """Export both models; then with a writer that waits for another rank, and one that fails."""
    from megatron.core import parallel_state

    from megatron_rl.actor import export, groups
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.settings import ActorSettings

    root, save_file, writers = Path(root), export.save_file, []

    def save(tensors, path, **options):
        writers.append(rank)
        save_file(tensors, path, **options)

    def save_when_waited_for(tensors, path, **options):
        if rank == 0:
            end = time.monotonic() + 100
            while not (root / "waited").exists():
                assert time.monotonic() < end, "a waiting rank counts no progress"
                time.sleep(0.01)
        save_file(tensors, path, **options)

    def fail(tensors, path, **options):
        if rank == 2:
            raise OSError("disk full")
        save_file(tensors, path, **options)

    for model, layout in LAYOUTS:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        topology = groups.initialise(**layout)
        actor = MegatronActor(root / model, topology=topology, settings=ActorSettings())
        with small_files(), mock.patch.object(export, "save_file", save):
            actor.export_hf(root / f"{model}-exported")
    beats = 0

    def count_waiting(done, total):
        nonlocal beats
        beats += done == total and rank == 3
        if beats == BEATS:
            (root / "waited").touch()

    with mock.patch.object(export, "save_file", save_when_waited_for):  # one file, rank 0 writes
        actor.export_hf(root / "waited-for", count_waiting)
    with (
        small_files(),
        mock.patch.object(export, "save_file", fail),
        pytest.raises(Exception, match="disk full") as error,
    ):
        actor.export_hf(root / "failed")
    return sorted(set(writers)), beats, str(error.value)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    make_folders(folder)
    return folder


@pytest.fixture(scope="module")
def exported(root):
    return run_ranks(export_all, RANKS, str(root))


def read_all(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: one for file in files for name, one in load_file(file).items()}, len(files)


@pytest.mark.parametrize("model", [model for model, _ in LAYOUTS])
def test_several_writers_write_identical_tensors(exported, root, model):
    import transformers

    source, _ = read_all(root / model)
    tensors, files = read_all(root / f"{model}-exported")
    assert files > 3 and tensors.keys() == source.keys()
    assert all(torch.equal(tensors[name], source[name]) for name in source)
    found = transformers.AutoModelForCausalLM.from_pretrained(root / f"{model}-exported")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(root / model).state_dict()
    assert all(torch.equal(one, wanted[name]) for name, one in found.state_dict().items())


def test_writers_are_spread_over_ranks(exported):
    assert [writers for writers, _, _ in exported] == [[0], [1], [2], []]


def test_waiting_ranks_count_progress(exported, root):
    assert exported[3][1] >= BEATS
    assert (root / "waited-for" / "model.safetensors").is_file()


def test_error_of_writer_is_raised_on_all_ranks(exported, root):
    assert all("disk full" in error for _, _, error in exported)
    assert not (root / "failed").exists()


def export_and_die(root):
    """Killed while the second file is written."""
    from megatron_rl.actor import export
    from megatron_rl.distributed.topology import Topology
    from megatron_rl.models.shape import read_model_shape
    from megatron_rl.resharding.pieces import parameter_shapes

    topology, shape = Topology.single(), read_model_shape(root / "dense")
    sizes = parameter_shapes(export.layout_of(topology).pieces(shape, rank=0))
    parameters = {name: torch.zeros(size) for name, size in sizes.items()}
    save_file, saved = export.save_file, []

    def save_one(tensors, path, **options):
        if saved:
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(path)
        save_file(tensors, path, **options)

    with small_files(), mock.patch.object(export, "save_file", save_one):
        export.export_weights(
            parameters,
            shape=shape,
            topology=topology,
            source=root / "dense",
            folder=root / "killed",
        )


def test_killed_export_leaves_no_folder_of_that_name(root):
    process = start_process(export_and_die, root)
    process.join(timeout=200)
    assert process.exitcode == -signal.SIGKILL
    assert not (root / "killed").exists()
    assert list((root / ".killed.partial").glob("*.safetensors"))


def test_exported_config_lists_no_layers_that_predict_further_tokens(tmp_path):
    from megatron_rl.actor.export import begin_folder

    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("a template")
    (source / "read_from_gguf.json").write_text("{}")  # which these weights are not
    for config in ({"num_nextn_predict_layers": 1, "x": 2}, {"num_nextn_predict_layers": 0}):
        text = json.dumps(config, separators=(",", ":"))
        (source / "config.json").write_text(text)
        begin_folder(tmp_path / "partial", source)
        written = (tmp_path / "partial" / "config.json").read_text()
        assert json.loads(written) == config | {"num_nextn_predict_layers": 0}
        assert (written == text) == (config["num_nextn_predict_layers"] == 0)  # a copy
    copied = tmp_path / "partial" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "a template"
    assert not (tmp_path / "partial" / "read_from_gguf.json").exists()
