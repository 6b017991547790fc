"""Tests of the estimated disk space of a run, less what its files already occupy."""

import os
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.preflight.resources import check_disk, describe_size, export_bytes_per_parameter
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.failures import describe_space
from tests.unit.resharding.shapes import small_shape

CONFIG = {
    "model": {"path": "m"}, "data": {"train": "t"},
    "rollout": {"prompts_per_step": 4, "responses_per_prompt": 2, "max_response_tokens": 100},
    "trainer": {"steps": 10, "keep_checkpoints": 2},
}  # fmt: skip


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free bytes of the disk."""
    usage = shutil.disk_usage("/")

    def set_free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size))

    return set_free


def needs(run, free, **sections):
    """Find by bisection the smallest free space that is enough."""
    config = parse_config(CONFIG | sections)
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        free(middle)
        try:
            check_disk(config, run, small_shape())
            high = middle
        except ConfigError:
            low = middle + 1
    return low


def test_check_disk_counts_existing_files_of_resumed_run(tmp_path, free):
    parameters = sum(_product(size) for size in tensor_shapes(small_shape()).values())
    run = RunDirectory(tmp_path / "a")
    # 3 checkpoints of 16 bytes a parameter, each with its step's rollouts, and 4 for the model; 10
    # steps of 4 * 2 * 100 / 4 tokens of 12 bytes in rollouts/, and in generated/, as the checkpoint
    # comes after 10.
    fresh = parameters * (3 * 16 + 4) + (3 + 10 + 10) * 200 * 12
    assert needs(run, free) == fresh
    for folder in (run.checkpoints.path / "step_000001", run.rollouts):
        folder.mkdir(parents=True)
    (run.checkpoints.path / "step_000001" / "weights").write_bytes(b"x" * 1000)
    assert needs(run, free) == fresh - 1000
    # Two steps of 100 and 300 bytes exist: eight more of 200.
    for step, size in ((1, 100), (2, 300)):
        (run.rollouts / f"step_{step:06d}.parquet").write_bytes(b"x" * size)
    assert needs(run, free) == parameters * 52 - 1000 + (3 + 8 + 10) * 200
    # The existing checkpoints occupy more than the estimate, which then counts none.
    (run.checkpoints.path / "step_000001" / "weights").write_bytes(b"x" * parameters * 100)
    assert needs(run, free) == parameters * 4 + (8 + 10) * 200


STEP = 200 * 12  # bytes


@pytest.mark.parametrize(
    ("sections", "more"),
    [
        # None of the 10 files in rollouts/ is complete: 2 of 4 groups, to trace 2 responses.
        ({"logging": {"traced_responses": 2, "keep_rollouts": 4}}, -6 * STEP // 2),
        ({"lag": {"batches": 2}}, 3 * 2 * STEP),  # 2 queued batches in each of 3 checkpoints
        # 2 of 4 groups are new: 3 batches of new groups are kept besides the current one.
        ({"replay": {"capacity": 4, "fresh": 0.5}}, 3 * 3 * STEP // 2),
        (
            {"lag": {"partial_rollouts": 8}, "behavior": "engine"},
            -10 * STEP,
        ),  # no generated/ between checkpoints
    ],
    ids=str,
)
def test_check_disk_counts_every_growing_folder(tmp_path, free, sections, more):
    run = RunDirectory(tmp_path / "a")
    assert needs(run, free, **sections) == needs(run, free) + more


@pytest.mark.parametrize("rank", [None, 2])
def test_check_disk_counts_what_a_critic_trains(tmp_path, free, rank):
    shape, run = small_shape(), RunDirectory(tmp_path / "a")
    lora = None if rank is None else {"rank": rank, "targets": ["proj"]}
    critic = {"critic": {"lora": lora, "learning_rate": 1e-3}, "objective": "ppo"}
    parameters = sum(_product(size) for size in tensor_shapes(shape).values())
    if rank is not None:  # of A and B in each layer, and the value head
        heads = shape.num_attention_heads * shape.head_dim
        parameters = shape.num_layers * rank * (heads + shape.hidden_size) + shape.hidden_size
    assert needs(run, free, **critic) == needs(run, free) + 3 * 16 * parameters


def test_check_disk_counts_evaluations_by_rows(tmp_path, free):
    """3 problems, 5 responses of 100 / 4 tokens of 8 bytes; before training, after 4, 8 and 10."""
    run, file = RunDirectory(tmp_path / "a"), tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["?"] * 3}), file)
    sections = {"eval": {"sets": {"x": str(file)}, "samples": 5, "every": 4}}
    before = needs(run, free)
    assert needs(run, free, **sections) == before + 4 * 3 * 5 * 25 * 8
    run.evaluations.mkdir(parents=True)
    for name in ("x_000000", "x_000004", "other_x_000000"):
        (run.evaluations / f"{name}.parquet").write_bytes(b"x" * 70)
    assert needs(run, free, **sections) == before + 2 * 70


def test_disk_whose_inodes_are_in_use_is_refused_and_named(tmp_path, free, monkeypatch):
    free(1 << 40)
    disk = os.statvfs(tmp_path)
    few = SimpleNamespace(f_files=400, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda folder: few)
    with pytest.raises(ConfigError, match="can take only 0 more files, since its inodes are"):
        check_disk(parse_config(CONFIG), RunDirectory(tmp_path / "a"), small_shape())
    assert describe_space(tmp_path).endswith("no more files can be made: all its inodes are in use")
    few.f_files = 0  # as btrfs: it has no limit
    check_disk(parse_config(CONFIG), RunDirectory(tmp_path / "a"), small_shape())
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)
    assert describe_space(tmp_path).endswith("bytes free")


def test_check_disk_error_names_sizes_and_purposes(tmp_path, free):
    free(1000)
    with pytest.raises(ConfigError, match=r"1000 bytes free but the run needs .* KiB more") as e:
        check_disk(parse_config(CONFIG), RunDirectory(tmp_path / "a"), small_shape())
    assert "for 2 + 1 checkpoints" in str(e.value)
    assert describe_size(301.8 * 2**30) == "301.8 GiB"


def _product(size):
    total = 1
    for one in size:
        total *= one
    return total


def test_exported_parameters_have_the_bytes_of_the_models_files(tmp_path):
    """Exported files have their dtypes: half of the parameters in two bytes, half in four."""
    assert export_bytes_per_parameter(tmp_path) == 4  # nothing is known
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert export_bytes_per_parameter(tmp_path) == 2
    tensors = {"a": torch.zeros(6, dtype=torch.bfloat16), "b": torch.zeros(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert export_bytes_per_parameter(tmp_path) == 3
