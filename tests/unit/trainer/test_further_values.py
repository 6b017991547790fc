"""A value of each token that the package does not know, from an engine of one's own to the loss.

What a user writes is this file's engine, which returns the value, and the loss that takes it.
`test_token_places.py` carries it between ranks, through replay and through a checkpoint's file.
"""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.actor.model import HeadOutputs
from megatron_rl.actor.packs import PackCache
from megatron_rl.config import ConfigError
from megatron_rl.data.packing import build_pack
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.rollouts import offline
from megatron_rl.types import Denominators
from tests.unit.resharding.shapes import small_shape
from tests.unit.rollouts.test_offline import Letters, config
from tests.unit.trainer.scripted import ScriptedEngine, run_loop

LOSS = {"objective": {"name": "function", "function": "tests.unit.objectives.own_losses:advised"}}


class AdvisingEngine(ScriptedEngine):
    def generate(self, prompts, *, on_response, **options):
        def give(place, response):
            given[place] = replace(response, further={"advice": advice(response)})
            on_response(place, given[place])

        given = {}
        responses = super().generate(prompts, on_response=give, **options)
        return [given[place] for place in range(len(responses))]


def advice(response):
    return np.array([response.prompt_index + 0.5, -response.sample_index - 1], np.float32)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A run of the scripted engine and actor."""
    monkeypatch.setattr(offline, "load_tokenizer", lambda folder, **options: Letters())
    run_loop(tmp_path / "run", engine=AdvisingEngine)
    return tmp_path / "run"


def test_engine_s_values_are_recorded_read_again_and_weigh_the_loss(recorded):
    settings = config(recorded, rollout={"responses_per_prompt": 4}, **LOSS)
    rollouts = list(offline.OfflineRollouts.open(settings).read(range(16, 32)))
    expected = [advice(one.response).tolist() for one in rollouts]
    table = pq.read_table(recorded / "rollouts" / "step_000002.parquet")
    assert table["advice"].to_pylist() == expected
    assert [one.response.further["advice"].tolist() for one in rollouts] == expected
    check_loss(rollouts)


def check_loss(rollouts):
    """The loss is that of the values, also where each context-parallel rank has its shard."""
    pack = build_pack(rollouts, torch.ones(len(rollouts)), indices=range(16), alignment=4)
    values = np.concatenate([one.response.further["advice"] for one in rollouts])
    assert pack.further["advice"][pack.response_mask].tolist() == values.tolist()
    logprobs = -torch.rand(len(pack.tokens), generator=torch.Generator().manual_seed(1))
    pack = replace(pack, behavior_logprobs=logprobs)
    total = 0.0
    for rank in range(2):
        topology = Topology(world_size=2, rank=rank, cp_size=2, cp_rank=rank)
        local = PackCache(small_shape(), topology, dtype=torch.float32).prepare(pack)
        output = local.shard(logprobs)[None]
        inputs = local.token_inputs(pack, output, HeadOutputs(entropy=False))
        here = local.layout.mask
        total -= float((inputs.further["advice"] * inputs.policy_logprobs)[here].double().sum())
    local = PackCache(small_shape(), Topology.single(), dtype=torch.float32).prepare(pack)
    inputs = local.token_inputs(pack, logprobs[None], HeadOutputs(entropy=False))
    objective = build_objective(**LOSS["objective"], aggregation="token_sum")
    whole = {"layout": local.layout, "denominators": Denominators(16.0, 32.0)}
    assert float(objective(inputs, **whole).loss.sum()) == pytest.approx(total, rel=1e-5)
    with pytest.raises(ValueError, match="advice is missing, but an option of the objective needs"):
        objective(replace(inputs, further={}), **whole)


def test_file_without_the_value_is_refused(recorded):
    for file in (recorded / "rollouts").glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["advice"]), file)
    settings = config(recorded, rollout={"responses_per_prompt": 4}, **LOSS)
    with pytest.raises(ConfigError, match=r"row 0: advice has 0 numbers for 2 sampled tokens"):
        offline.OfflineRollouts.open(settings).check()
