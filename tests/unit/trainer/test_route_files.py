"""Names of tokens in files of routes: one each, whatever the layout pads."""

import numpy as np
import pytest
import torch

from megatron_rl.data.packing import build_pack
from megatron_rl.trainer.route_files import token_keys
from megatron_rl.types import GradeResult, Prompt, Response, Rollout


@pytest.mark.parametrize("alignment", [2, 8])
def test_each_token_has_a_name_that_does_not_depend_on_padding(alignment):
    # Sequences of 4 + 2, of 2 + 3 and of 4 tokens, each without its last: 5, 4 and 3 positions.
    responses = [
        Response(0, 0, np.arange(7), np.zeros(5), "", "stop", 0, observed=((2, 4),), restarts=(2,)),
        Response(0, 1, np.arange(3), np.zeros(3), "", "stop", 0),
    ]
    prompts = [Prompt(0, (), (1, 2, 3, 4), "", ""), Prompt(0, (), (1,), "", "")]
    rollouts = [
        Rollout(prompt, response, GradeResult(0.0, "", None))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    pack = build_pack(rollouts, torch.zeros(2), indices=(0, 1), alignment=alignment)
    (names,) = token_keys(pack)
    assert len(set(names.tolist())) == len(names)
    starts = np.cumsum([0, *pack.sequence_lengths])
    used = [names[start : start + size] for start, size in zip(starts, (5, 4, 3), strict=False)]
    wanted = [range(5), range(1 << 24, (1 << 24) + 4), range(1 << 32, (1 << 32) + 3)]
    assert torch.cat(used).tolist() == [name for names in wanted for name in names]
