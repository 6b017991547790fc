"""Peak memory of phases on a device that an engine shares."""

import torch

from megatron_rl.telemetry.peak_memory import PeakMemory


def test_memory_released_by_sleeping_engine_is_excluded(monkeypatch):
    counted = {"now": 0, "most": 0}  # by torch: it counts memory that the engine has unmapped

    def hold(change):
        counted["now"] += change
        counted["most"] = max(counted["most"], counted["now"])

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counted["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counted["most"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: counted.update(most=counted["now"])
    )
    memory = PeakMemory("cuda")
    hold(40)  # the engine's
    memory.reset()  # a phase that puts the engine to sleep
    hold(3)
    memory.count_without(40)
    assert (memory.peak(), memory.now()) == (43, 3)
    memory.reset()  # training
    hold(55)
    hold(-50)
    assert (memory.peak(), memory.now()) == (58, 8)
    memory.reset()  # a push: training's memory goes, then the engine wakes
    hold(20)
    hold(-25)
    memory.count_without(0)
    hold(2)
    assert (memory.peak(), memory.now()) == (45, 45)
    hold(-2)
    memory.reset()
    assert memory.peak() == 43
