"""One start of eight gloo processes for all tests of the layout and of the objectives."""

import functools

from tests.ranks import run_ranks


def on_rank(rank, world_size):
    """What every test module wants of this rank."""
    from tests.unit.distributed import test_ranks
    from tests.unit.objectives import test_invariance, test_mutations

    return {
        "layout": test_ranks.on_rank(rank, world_size),
        "objectives": test_invariance.on_rank(rank, world_size),
        "mutations": test_mutations.on_rank(rank, world_size),
    }


@functools.cache
def all_results():
    """Each rank's results, computed by whichever test asks first."""
    return run_ranks(on_rank, 8)
