"""In which order the parts of a run take the device's memory."""

import re
from types import SimpleNamespace

import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.config.sections import RewardSection
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import build_objective
from megatron_rl.preflight.trials import start_trial
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rollouts.prompt_sets import PromptSets
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import Interruption
from megatron_rl.runtime.watchdog import Heartbeat
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import StartUp
from megatron_rl.trainer import build
from megatron_rl.types import Prompt
from tests.unit.trainer.scripted import make_config


def test_checkpoint_loads_before_engine_allocates_memory(tmp_path, monkeypatch):
    config = parse_config(
        {
            "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {"prompts_per_step": 4}, "logging": {"tensorboard": False},
        }
    )  # fmt: skip
    directory = RunDirectory(tmp_path)
    directory.create(config)
    directory.checkpoints.begin(3)
    directory.checkpoints.complete(3, sums={}, digests=[])
    events = []

    class ScriptedActor:
        def __init__(self, folder, *, topology, settings, on_micro_batch):
            self.topology, self.packs = topology, SimpleNamespace()
            events.append("actor")

        def digest(self):
            return {"layout": "one", "sum": "0"}

        def load(self, folder):
            events.append(f"load {folder.parent.name}")

        def sleep(self):
            events.append("sleep")

    def build_scripted_engine(config, topology, *, hooks):
        assert not hooks.should_stop()
        events.append("engine")
        return SimpleNamespace(describe_stop=lambda: "", without_effect=None)

    monkeypatch.setattr(build, "MegatronActor", ScriptedActor)
    monkeypatch.setattr(build, "build_engine", build_scripted_engine)
    monkeypatch.setattr(
        build,
        "start_verifiers",
        lambda pool, row, config: events.append(f"try {row.ground_truth}"),
    )
    trainer = build.TrainingSide(
        config,
        build_objective("pnpo"),
        PromptSets([Prompt(0, (), (1,), "7", "set")], PromptOrder(1, seed=0), {}),
        SimpleNamespace(pool=None),
        None,
        directory=directory,
        console=Console(is_main_rank=False),
        topology=Topology.single(),
        interruption=Interruption(),
        start=StartUp(),
        progress=Heartbeat(),
    ).build()
    assert events == ["actor", "load step_000003", "try 7", "sleep", "engine"]
    assert trainer.checkpoints.done == 3


def test_missing_tokenizer_is_refused_before_engine_starts(tmp_path):
    settings = {"model": {"path": str(tmp_path)}, "data": {"train": "t.jsonl"}}
    with pytest.raises(ValueError, match="has no tokenizer"):
        build.build_engine(parse_config(settings), Topology.single())


def test_verifier_without_reward_is_refused_by_one_error():
    name = "tests.unit.rewards.misbehaving_verifiers:return_a_pair"
    prompt = Prompt(0, (), (1,), "7", "set")
    with (
        VerifierPool(RewardSection(verifier=name)) as pool,
        pytest.raises(
            ConfigError, match=r"(?s)^reward.verifier=.*returned \(0.0, 'wrong'\); return"
        ),
    ):
        build.start_verifiers(pool, prompt, make_config())


def test_majority_vote_of_numbers_cannot_select_best():
    """Refused by the command, and by the ranks that another launcher starts."""
    name = "tests.unit.rewards.misbehaving_verifiers:break_in_a_run"  # here it returns 0
    prompt = Prompt(0, (), (1,), "7", "set")
    vote, mean = (
        make_config(sections={"reward": {"verifier": name}}, keep_best=f"eval_macro/{score}@2")
        for score in ("maj", "avg")
    )
    message = r"^trainer.keep_best=eval_macro/maj@2: a majority vote needs answers, and reward.veri"
    with start_trial(vote) as trial:
        assert not trial.problems(prompt, keep_best=mean.trainer.keep_best)
        (problem,) = trial.problems(prompt, keep_best=vote.trainer.keep_best)
        assert re.match(message, problem)
        assert trial.pool is not None
        build.start_verifiers(trial.pool, prompt, mean)
        with pytest.raises(ConfigError, match=message):
            build.start_verifiers(trial.pool, prompt, vote)
