"""How much disk a run needs: less by what its own checkpoints take already."""

import shutil

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.preflight.disk import check_disk, describe_size
from megatron_rl.runs.directory import RunDirectory
from tests.unit.resharding.shapes import small_shape

CONFIG = {
    "model": {"path": "m"}, "data": {"train": "t"},
    "rollout": {"prompts": 4, "responses_per_prompt": 2, "max_response_tokens": 100},
    "trainer": {"steps": 10, "keep_checkpoints": 2},
}  # fmt: skip


@pytest.fixture
def free(monkeypatch):
    """Sets how much the disk has."""
    usage = shutil.disk_usage("/")

    def set_free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size))

    return set_free


def needs(run, free):
    """The least that is enough, by bisection."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        free(middle)
        try:
            check_disk(parse_config(CONFIG), run, small_shape())
            high = middle
        except ConfigError:
            low = middle + 1
    return low


def test_a_run_that_continues_needs_less_by_its_own_checkpoints(tmp_path, free):
    from megatron_rl.models.shape import tensor_shapes

    parameters = sum(_product(size) for size in tensor_shapes(small_shape()).values())
    run = RunDirectory(tmp_path / "a")
    # 3 checkpoints of 16 bytes a parameter, 4 for the model; 10 steps of 4 * 2 * 100 / 4 tokens of
    # 12 bytes.
    fresh = parameters * (3 * 16 + 4) + 10 * 200 * 12
    assert needs(run, free) == fresh
    for folder in (run.checkpoints.path / "step_000001", run.rollouts):
        folder.mkdir(parents=True)
    (run.checkpoints.path / "step_000001" / "weights").write_bytes(b"x" * 1000)
    assert needs(run, free) == fresh - 1000
    # Two steps are written, of 100 and 300 bytes: eight more of 200.
    for step, size in ((1, 100), (2, 300)):
        (run.rollouts / f"step_{step:06d}.parquet").write_bytes(b"x" * size)
    assert needs(run, free) == fresh - 1000 - 10 * 200 * 12 + 8 * 200
    # More than it needs, from a run that kept more: nothing is owed.
    (run.checkpoints.path / "step_000001" / "weights").write_bytes(b"x" * parameters * 100)
    assert needs(run, free) == parameters * 4 + 8 * 200


def test_the_refusal_says_what_needs_how_much(tmp_path, free):
    free(1000)
    with pytest.raises(ConfigError, match=r"1000 bytes free but the run needs .* KiB more") as e:
        check_disk(parse_config(CONFIG), RunDirectory(tmp_path / "a"), small_shape())
    assert "for 2 + 1 checkpoints (0 bytes are there)" in str(e.value)
    assert describe_size(301.8 * 2**30) == "301.8 GiB"


def _product(size):
    total = 1
    for one in size:
        total *= one
    return total
