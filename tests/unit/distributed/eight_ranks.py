"""Results of one group of eight gloo processes, shared by the layout and objective tests."""

import functools

from tests.ranks import run_ranks


def on_rank(rank, world_size):
    """Return this rank's results for every test module."""
    from tests.unit.distributed import test_gated_delta, test_ranks
    from tests.unit.objectives import test_conversations, test_invariance, test_mutations

    return {
        "layout": test_ranks.on_rank(rank, world_size),
        "objectives": test_invariance.on_rank(rank, world_size),
        "mutations": test_mutations.on_rank(rank, world_size),
        "delta": test_gated_delta.on_rank(rank, world_size),
        "conversations": test_conversations.on_rank(rank, world_size),
    }


@functools.cache
def all_results():
    """Return every rank's results, computed on the first call."""
    return run_ranks(on_rank, 8)
