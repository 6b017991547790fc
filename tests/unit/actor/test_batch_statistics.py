"""Statistics that decide rates and stops have the same bits on every rank."""

import torch

from megatron_rl.objectives.statistics import DECILES, Statistics
from tests.ranks import run_ranks

LAYOUTS = ({"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}, {"pipeline": 4})


def reduce_perturbed(rank, world_size):
    """Each rank adds its own number of ulps, as a device that adds in any order does."""
    from megatron.core import parallel_state

    from megatron_rl.actor import groups
    from megatron_rl.actor.batch_statistics import reduce_statistics

    results = []
    for layout in LAYOUTS:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        topology = groups.initialise(**layout)
        report = Statistics.empty(classes=1)
        # Of one band 100 tokens inside, with weights 0.9 whose squares are 0.81.
        row = report.bands()[0][DECILES - 1]
        row[0], row[11], row[12] = 100.0, 90.0, 81.0
        report.maxima.zero_()
        report.classes.fill_(1 / 3)
        for part in report.tensors:
            for _ in range(rank):
                part.copy_(torch.nextafter(part, part.new_tensor(torch.inf)))
        total = reduce_statistics([report] * 3, classes=1, topology=topology)
        fraction = total.everything().effective_sample_fraction()
        results.append(([part.numpy().tobytes() for part in total.tensors], fraction))
    return results


def test_ranks_differing_in_last_bit_decide_identically():
    first, *others = run_ranks(reduce_perturbed, 4)
    for parts, fraction in first:
        assert len(parts) == 3 and 0.9 < fraction < 1.1
    assert all(other == first for other in others)
