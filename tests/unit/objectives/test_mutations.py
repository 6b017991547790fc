"""Typical mistakes, made on purpose: each must be caught by the checks that prove the objectives.

The checks are those of test_definitions (double loops) plus the inclusive bounds, and, on ranks,
those of test_invariance (context parallelism against one process).
"""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.advantages import group_relative_advantages
from megatron_rl.distributed import chunk_scan
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import (
    TokenInputs,
    build_objective,
    constraints,
    objective,
    weights,
)
from megatron_rl.types import Denominators
from tests.unit.distributed.four_ranks import all_results
from tests.unit.objectives import naive, test_definitions, test_invariance
from tests.unit.objectives.mutate import mutated

# The first one that fails ends a check: those that find most of the mistakes come first.
CHECKED = (
    "balanced_prefix",
    "dppo_kl",
    "opsm",
    "balanced",
    "minpro",
    "cppo",
    "sapo",
    "vespo",
    "m2po",
    "pnpo",
    "exact_prefix_score",
    "topr",
    "gspo",
    "grpo",
    "ctpo",
    "cispo",
    "sao",
    "vaco",
    "pnpo_one_sided",
    "asymre",
    "positive_only",
    "damped_negatives",
    "dppo_tv",
)

MUTATIONS = {
    "t starts at 0": (
        weights.compute_log_weight,
        "position.clamp(min=1)",
        "position.sub(1).clamp(min=1)",
    ),
    "t is the token index": (
        SequenceLayout._counts,
        "running[self.local_index + 1] - before[ids]",
        "self.offsets + 1",
    ),
    "prompt tokens are counted": (
        SequenceLayout._counts,
        "self.full_mask.cumsum",
        "torch.ones_like(self.full_mask).cumsum",
    ),
    "values off the mask enter the sums": (
        chunk_scan.scan_together,
        "torch.where(layout.mask, s.x, IDENTITY[s.combine])",
        "s.x + layout.mask.logical_not()",
    ),
    "the ratio is behavior over policy": (
        objective.Objective.compute_weights,
        "policy - x.behavior_logprobs",
        "x.behavior_logprobs - policy",
    ),
    "bounds exclude their ends": (
        constraints.hard_gate,
        "log_weight < lower, log_weight > upper",
        "log_weight <= lower, log_weight >= upper",
    ),
    "the gate truncates": (
        constraints.hard_gate,
        "_kept(log_weight, ~(below | above))",
        "_kept(log_weight.clamp(lower, upper), below == below)",
    ),
    "the gate has the scale of its inverse": (
        constraints.position_scale,
        "layout.length.to(dtype) / position",
        "position / layout.length.to(dtype)",
    ),
    "clipping ignores the sign of the advantage": (
        constraints.ppo_clip,
        "torch.where(advantages < 0, lower, -torch.inf)",
        "lower",
    ),
    "the one-sided gate rejects where a clip does not": (
        constraints.hard_gate,
        "below & (advantages < 0), above & (advantages > 0)",
        "below & (advantages > 0), above & (advantages < 0)",
    ),
    "the taper ignores the sign of the advantage": (
        constraints.taper,
        "torch.where(advantages < 0, bounds[:, 1:], bounds[:, :1])",
        "bounds[:, :1].expand(2, len(advantages))",
    ),
    "the budget counts the token itself": (
        weights.budget_weights,
        "before - slope * before * (before - 1) / 2",
        "before + 1 - slope * before * (before + 1) / 2",
    ),
    "the budget's weights do not fall": (
        weights.budget_weights,
        "1 - slope * before,",
        "1 + 0 * before,",
    ),
    "the budget also holds what moves back": (
        constraints.prefix_budget,
        "within | (x.advantages * ratios.token.detach() <= 0)",
        "within",
    ),
    "the second moment is of all tokens": (
        constraints.second_moment_gate,
        "(log_ratios * advantages > 0) &",
        "",
    ),
    "the second moment is that of the log-ratios' sizes": (
        constraints.second_moment_gate,
        "sizes.square().cumsum(0)",
        "sizes.cumsum(0)",
    ),
    "the divergence ignores the direction of the advantage": (
        constraints.divergence_gate,
        "(divergence <= bound) | (x.advantages * log_ratio <= 0)",
        "divergence <= bound",
    ),
    "the KL leaves out the other tokens": (
        constraints.divergence_gate,
        "torch.xlogy(rest, rest) - torch.xlogy(rest, rest_after) - before * log_ratio",
        "-before * log_ratio",
    ),
    "the KL is that of policy to behavior": (
        constraints.divergence_gate,
        "torch.xlogy(rest, rest) - torch.xlogy(rest, rest_after) - before * log_ratio",
        "torch.xlogy(rest_after, rest_after) - torch.xlogy(rest_after, rest) + after * log_ratio",
    ),
    "the soft gate has one temperature": (
        constraints.soft_gate,
        "negative=gate.negative_temperature",
        "negative=gate.positive_temperature",
    ),
    "the soft gate is not divided by its temperature": (
        constraints.soft_gate,
        "value * 4 / temperature",
        "value * 4",
    ),
    "the kernel has the other sign's numbers": (
        constraints.gamma_kernel,
        "negative=kernel.negative_power, other=kernel.positive_power",
        "negative=kernel.positive_power, other=kernel.negative_power",
    ),
    "the kernel is not 1 at 1": (
        constraints.gamma_kernel,
        "torch.expm1(log_weight)",
        "torch.exp(log_weight)",
    ),
    "the factor of negatives is that of all": (
        constraints.scale_negative,
        "negative=factor, other=1.0",
        "negative=factor, other=factor",
    ),
    "what is dropped counts as left alone": (
        constraints.scale_negative,
        "constrained.inside & ~dropped",
        "constrained.inside",
    ),
    "the balance is of advantages alone": (
        objective.sign_noise,
        "torch.expm1(behavior_logprobs.double())",
        "1",
    ),
    "the balance is not a root": (
        objective.balance,
        "math.sqrt(positive / negative)",
        "positive / negative",
    ),
    "the balance has its signs swapped": (
        objective.Objective.resolve,
        "balance(*noise.tolist())",
        "balance(*noise.flip(0).tolist())",
    ),
    "the balance may amplify": (
        objective.balance,
        "min(1.0, math.sqrt(positive / negative))",
        "math.sqrt(positive / negative)",
    ),
    "the sequence mask takes a sum for a mean": (
        objective.dropped_negatives,
        "/ ratios.layout.length.clamp(min=1)",
        "",
    ),
    "the sequence mask also takes what rose": (
        objective.dropped_negatives,
        "mean < -spec.off_policy_mask",
        "mean.abs() > spec.off_policy_mask",
    ),
    "the sequence mask is of both signs": (
        objective.dropped_negatives,
        "negative & (mean",
        "(x.advantages != 0) & (mean",
    ),
    "dual clip for positive advantages": (
        constraints.ppo_clip,
        "torch.where(advantages > 0, upper, torch.where(advantages < 0, dual, torch.inf))",
        "torch.where(advantages < 0, upper, torch.where(advantages > 0, dual, torch.inf))",
    ),
    "denominators by accepted count": (
        objective.Objective.evaluate,
        "policy_term = -torch.where(layout.mask, term / denominator, 0)",
        "kept = layout.sequence_ids.bincount((term != 0).double()).clamp(min=1)\n"
        "    kept = layout.length / kept[layout.sequence_ids]\n"
        "    policy_term = -torch.where(layout.mask, term / denominator * kept, 0)",
    ),
    "response mean over the padded length": (
        objective.token_denominator,
        "layout.length.clamp(min=1)",
        "layout.sequence_ids.bincount()[layout.sequence_ids]",
    ),
    "token mean per response": (
        objective.token_denominator,
        "return denominators.tokens",
        "return layout.length.clamp(min=1)",
    ),
    "a detached weight carries a gradient": (
        objective.Objective.compute_weights,
        "x.policy_logprobs.detach() if detached else x.policy_logprobs",
        "x.policy_logprobs",
    ),
    "the gradient does not flow through the weight": (
        objective.Objective.compute_weights,
        "x.policy_logprobs.detach() if detached else x.policy_logprobs",
        "x.policy_logprobs.detach() + 0 * x.policy_logprobs",
    ),
    "masked values are multiplied away": (
        TokenInputs.prepared,
        "torch.where(layout.mask, own, zero)",
        "own * layout.mask",
    ),
    "the prefix minimum includes the token itself": (
        chunk_scan._Scans.forward,
        "torch.where(layout.chunk_columns == 0, torch.inf, shifted)",
        "chunk.running",
    ),
    "sequences are not scanned apart": (
        chunk_scan._scan_chunks,
        "rows.tables(flat)",
        "[flat[None]]",
    ),
    "the backward scan runs forward": (
        chunk_scan._sum_backward,
        'running, "sum", reverse=True',
        'running, "sum", reverse=False',
    ),
}


def assert_inclusive_bounds():
    """One-token responses exactly on the bounds are accepted, one float beyond are not."""
    upper = torch.log1p(torch.tensor(9.5e-4, dtype=torch.float64))
    lower = torch.log1p(torch.tensor(-7e-4, dtype=torch.float64))
    beyond = torch.stack((upper * (1 + 1e-15), lower * (1 + 1e-15)))
    log_ratio = torch.cat((torch.stack((upper, lower)), beyond))
    result = build_objective("pnpo")(
        TokenInputs(
            policy_logprobs=log_ratio.clamp(max=0),
            behavior_logprobs=(-log_ratio).clamp(max=0),
            advantages=torch.ones(4, dtype=torch.float64),
        ),
        layout=SequenceLayout([1] * 4, torch.ones(4).bool()),
        denominators=Denominators(responses=4.0, tokens=4.0),
    )
    assert result.statistics.to_metrics()["gate/acceptance"] == 0.5


@functools.cache
def cases():
    """Name, responses, rows and what the loops find, which no mutation changes, of each check."""
    batches = []
    for name in reversed(CHECKED):
        rng = np.random.default_rng(5)
        for scale in (1e-3, 0.1):
            batches.append((name, *test_definitions.make_batch(rng, [1, 7, 60, 19], scale)))
    # What bounds more than a token shows on many of them, where about half are rejected.
    for name, scale in (("cppo", 0.2), ("m2po", 0.4)):
        batches.append((name, *test_definitions.make_batch(rng, [300, 200, 1, 250], scale)))
    batches += [small_means(), damped_wrong_answers(), late_tokens()]
    return [
        (*batch, naive.evaluate(naive.NAMED[batch[0]], batch[1])) for batch in reversed(batches)
    ]


def assert_correct():
    """Checks that a correct package passes, and that fail under every mutation."""
    for name, responses, rows, wanted in cases():
        test_definitions.compare(build_objective(name), wanted, responses, rows)
    assert_inclusive_bounds()


def small_means():
    """Mean log-ratios of -1e-5 and -1e-3 with sums of -1e-3 and -0.1; delta is 1e-4."""
    responses = [
        {"log_ratios": [mean] * 100, "logprobs": [-1.0] * 100, "advantages": [-1.0] * 100,
         "gaps": [0.0] * 100}
        for mean in (-1e-5, -1e-3)
    ]  # fmt: skip
    return "opsm", responses, [(100, np.arange(100))] * 2


def damped_wrong_answers():
    """Few sure tokens of a right answer, many unsure ones of a wrong one: a factor of 0.04."""
    responses = [
        {"log_ratios": [1e-5] * length, "logprobs": [logprob] * length,
         "advantages": [advantage] * length, "gaps": [0.0] * length}
        for length, logprob, advantage in ((3, -0.1, 1.0), (40, -1.0, -1.0))
    ]  # fmt: skip
    return "balanced", responses, [(n, np.arange(n)) for n in (3, 40)]


def late_tokens():
    """A probability moves by 0.17 at a response's end: 0.8 of it is within CPPO's 0.15."""
    moved = {
        "log_ratios": [0.0, 0.0, np.log(0.5 / 0.33)], "logprobs": [-1.0, -1.0, np.log(0.5)],
        "advantages": [1.0] * 3, "gaps": [0.0] * 3,
    }  # fmt: skip
    return "cppo", [moved], [(3, np.arange(3))]


@pytest.fixture(scope="module")
def unchanged():
    """The package passes before all mistakes, and after all of them."""
    assert_correct()
    yield
    assert_correct()


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistakes_are_caught(unchanged, mistake):
    with mutated(*MUTATIONS[mistake]), pytest.raises((AssertionError, ValueError)):
        assert_correct()


@pytest.mark.parametrize(
    ("old", "new"),
    [("1 if std ==", "0 if std =="), ("torch.where(equal, 0, centered)", "centered")],
)
def test_mistakes_in_advantages_are_caught(old, new):
    def check():
        half = group_relative_advantages(torch.tensor([[1.0, 0.0]]))[0, 0].item()
        assert half == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
        assert not group_relative_advantages(torch.full((1, 7), 0.1)).any()

    check()
    with mutated(group_relative_advantages, old, new), pytest.raises(AssertionError):
        check()


CP_MUTATIONS = {
    "swapped zigzag chunks": (
        SequenceLayout.local_index,
        "torch.stack((early, late), dim=1)",
        "torch.stack((late, early), dim=1)",
    ),
    "no carry between chunks": (
        chunk_scan._Scans.forward,
        "before = carry.reshape(-1)",
        "before = 0 * carry.reshape(-1)",
    ),
    "chunks in the order of ranks": (
        chunk_scan.order_chunks,
        "by_rank[:, 1].flip(0)",
        "by_rank[:, 1]",
    ),
    "the carry includes the chunk itself": (
        chunk_scan._carry_in,
        "(running[early], running[late])",
        "(running[early + 1], running[late + 1])",
    ),
    "L counted on the shard": (
        SequenceLayout._counts,
        "running[self.local_index + 1] - before[ids], length[ids]",
        "running[self.local_index + 1] - before[ids], length[ids] // self.cp_size",
    ),
    "the backward does not sum over ranks": (
        chunk_scan._sum_backward,
        "layout.spread(carried[-1].total)",
        "layout.spread(total)",
    ),
}


CP_OPTIONS = "k3, entropy, sequence mean"


def on_rank(rank, world_size):
    """Loss and gradient of two objectives at cp 2, unchanged and under every mutation."""
    groups = [dist.new_group([start, start + 1]) for start in range(0, world_size, 2)]
    results = {}
    for mistake in (None, *CP_MUTATIONS):
        for name in ("pnpo", "gspo"):
            if mistake is None:
                results[mistake, name] = run_at_cp_two(name, rank, groups)
            else:
                with mutated(*CP_MUTATIONS[mistake]):
                    results[mistake, name] = run_at_cp_two(name, rank, groups)
    return results


def run_at_cp_two(name, rank, groups):
    group = groups[rank // 2]
    loss, gradient, _ = test_invariance.run_micro_batch(
        (name, CP_OPTIONS), range(10), cp_rank=rank % 2, cp_size=2, cp_group=group
    )
    dist.all_reduce(loss, group=group)
    return loss.item(), gradient.numpy()


def same_as_one_process(mistake):
    for name in ("pnpo", "gspo"):
        wanted_loss, wanted_gradient, _ = test_invariance.run_micro_batch(
            (name, CP_OPTIONS), range(10)
        )
        loss, gradient = all_results()[0]["mutations"][mistake, name]
        if abs(loss - wanted_loss.item()) > 1e-11 * abs(loss):
            return False
        if not np.allclose(gradient, wanted_gradient, rtol=1e-10, atol=1e-15):
            return False
    return True


def test_unchanged_package_is_same_at_cp_two():
    assert same_as_one_process(None)


@pytest.mark.parametrize("mistake", CP_MUTATIONS)
def test_mistakes_of_context_parallelism_are_caught(mistake):
    assert not same_as_one_process(mistake)
