"""Peak memory of phases on a device that an engine shares, and seconds of the start."""

import pytest
import torch

from megatron_rl.runtime.processes import command_start
from megatron_rl.telemetry.metrics import PeakMemory, StartUp


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


def test_phases_cover_time_since_command_start():
    started = command_start()
    start = StartUp(started)
    for part in ("engine_check", "imports", "push"):
        start.ended(part)
    seconds = start.metrics()
    assert list(seconds) == [f"time/start_{part}" for part in ("imports", "engine_check", "push")]
    passed = start._last - started
    assert sum(seconds.values()) == pytest.approx(passed, abs=1e-3)
    assert "engine check" in str(start)
