"""In which order the parts of a run take the device's memory."""

from megatron_rl.config import parse_config
from megatron_rl.console import Console
from megatron_rl.distributed.topology import Topology
from megatron_rl.interruption import Interruption
from megatron_rl.objectives import build_objective
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.trainer import build


def test_a_run_continues_before_the_engine_takes_its_memory(tmp_path, monkeypatch):
    config = parse_config(
        {
            "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {"prompts": 4}, "logging": {"tensorboard": False},
        }
    )  # fmt: skip
    directory = RunDirectory(tmp_path)
    directory.create(config)
    partial = tmp_path / "partial"
    partial.mkdir()
    directory.complete_checkpoint(partial, 3)
    events = []

    class ScriptedActor:
        def __init__(self, folder, *, topology, settings):
            events.append("actor")

        def load(self, folder):
            events.append(f"load {folder.parent.name}")

        def sleep(self):
            events.append("sleep")

    monkeypatch.setattr(build, "MegatronActor", ScriptedActor)
    monkeypatch.setattr(build, "build_engine", lambda config, topology: events.append("engine"))
    trainer = build._build_trainer(
        config,
        objective=build_objective("pnpo"),
        prompts=[],
        order=None,
        eval_sets={},
        directory=directory,
        console=Console(speaks=False),
        topology=Topology.single(),
        judge=None,
        interruption=Interruption(),
    )
    assert events == ["actor", "load step_000003", "sleep", "engine"]
    assert trainer.done == 3
