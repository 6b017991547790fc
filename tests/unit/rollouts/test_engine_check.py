"""The comparison of log-probs before the first step, around a scripted actor and engines."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_rl.actor.settings import ActorSettings
from megatron_rl.distributed.topology import Topology
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.rollouts.behavior import PROMPTS_PER_ENGINE, check_engine
from megatron_rl.types import Prompt, Response

PROMPTS = [Prompt(i, (), (5, 6), "1", "toy") for i in range(3)]


class ScriptedActor:
    """Every token has log-prob -1."""

    topology, settings, sharing = Topology.single(), ActorSettings(), None
    packs = 0

    def compute_logprobs(self, micro_batches):
        self.packs += len(micro_batches)
        return [torch.where(b.response_mask, -1.0, 0.0) for b in micro_batches]


@dataclass
class ScriptedEngines:
    """Engine i answers every i-th prompt; those in `wrong` report log-probs that far off."""

    layout: EngineLayout
    wrong: dict
    dtype = torch.float32
    num_requests = 0

    def generate(self, prompts, *, samples, sampling):
        self.num_requests = len(prompts)
        engines = self.layout.world_size // self.layout.tensor
        return [
            Response(
                prompt.index, 0, np.array([7, 2], np.int32),
                np.full(2, -1.0 + self.wrong.get(place % engines, 0.0), np.float32), "", "stop", 0,
            )
            for place, prompt in enumerate(prompts)
        ]  # fmt: skip


def check(wrong, prompts=PROMPTS):
    engines = ScriptedEngines(EngineLayout(tensor=2, world_size=32), wrong)
    actor = ScriptedActor()
    gap = check_engine(actor, engines, prompts, temperature=1.0, seed=0, tokens_per_micro_batch=64)
    return gap, engines, actor


def test_every_engine_answers_in_packs_within_budget():
    gap, engines, actor = check({})
    assert gap == 0.0
    assert engines.num_requests == 16 * PROMPTS_PER_ENGINE  # of three prompts
    # A sequence of 2 + 2 - 1 tokens, padded to 4: 16 of them fill a pack.
    assert actor.packs == engines.num_requests // 16


def test_wrong_engine_of_sixteen_is_named():
    assert check({15: 5e-5})[0] == pytest.approx(5e-5, rel=1e-2)  # float32's rounding at 1
    # The mean over all sixteen would be 5e-4 / 16 = 3e-5, less than the 1e-4 that is allowed.
    with pytest.raises(RuntimeError, match=r"engine 15 differ .* by 0.0005.*1 of 16 engines"):
        check({15: 5e-4})
    with pytest.raises(RuntimeError, match=r"engine 9 differ .* by nan"):
        check({9: float("nan")})
