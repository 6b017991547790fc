"""What a process says as it ends."""

import errno
import os

from megatron_rl.commands.ending import is_full_disk


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
