"""What a process says as it ends."""

import errno
import os

import pytest
import torch

from megatron_rl.commands.ending import fail, is_full_disk
from megatron_rl.objectives import build_objective
from megatron_rl.objectives.statistics import Band


def test_a_full_disk_is_known_on_the_rank_that_met_it_and_on_the_others():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rollouts/step_000001.parquet")
    assert is_full_disk(full)
    # As `raised_together` tells the others.
    assert is_full_disk(RuntimeError(f"recording step 1: rank 0: OSError: {full}"))
    try:
        try:
            raise full
        except OSError as cause:
            raise RuntimeError("saving") from cause
    except RuntimeError as error:
        assert is_full_disk(error)
    assert not is_full_disk(OSError(errno.EACCES, "denied"))
    assert not is_full_disk(RuntimeError("something else"))


def test_a_user_s_error_is_said_and_one_of_our_own_shows_where_it_comes_from(capsys):
    with pytest.raises(ValueError) as told:
        build_objective("pnpos")
    assert fail(told.value, None) == 1
    assert capsys.readouterr().err.startswith("megatron-rl: error: unknown objective 'pnpos'")
    # A mistake of ours: Python says so, out of a function of the package.
    with pytest.raises(ValueError) as internal:
        Band(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        fail(internal.value, None)
