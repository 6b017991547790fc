"""Results of one group of four gloo processes, shared by the layout and objective tests."""

import atexit
import functools
import os
import pickle
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.ranks import run_ranks


def on_rank(rank, world_size):
    """Return this rank's results for every test module."""
    from tests.unit.distributed import test_advantage_scan, test_gated_delta, test_ranks
    from tests.unit.objectives import test_conversations, test_invariance, test_mutations

    return {
        "layout": test_ranks.on_rank(rank, world_size),
        "objectives": test_invariance.on_rank(rank, world_size),
        "mutations": test_mutations.on_rank(rank, world_size),
        "advantages": test_advantage_scan.on_rank(rank, world_size),
        "delta": test_gated_delta.on_rank(rank, world_size),
        "conversations": test_conversations.on_rank(rank, world_size),
    }


@functools.cache
def all_results():
    """Return every rank's results, computed on the first call of any test worker of this run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return run_ranks(on_rank, 4)
    file = Path(tempfile.gettempdir(), f"megatron_rl-four-ranks-{run}")
    with FileLock(f"{file}.lock"):
        if not file.exists():
            atexit.register(Path(f"{file}.lock").unlink, missing_ok=True)
            atexit.register(file.unlink, missing_ok=True)
            file.write_bytes(pickle.dumps(run_ranks(on_rank, 4)))
        return pickle.loads(file.read_bytes())
