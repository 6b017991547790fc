"""Peak memory of phases on a device that an engine shares, seconds of the start, timelines."""

import shutil

import numpy as np
import pytest
import torch

from megatron_rl.runtime.processes import command_start
from megatron_rl.telemetry import metrics
from megatron_rl.telemetry.metrics import (
    HostMemoryTrend,
    PeakMemory,
    PhaseClock,
    PhaseInterval,
    SlowRanks,
    StartUp,
    free_memory,
)


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


def test_timeline_of_step_has_its_phases_where_they_began(monkeypatch):
    """The second row begins where the first ends, in the midst of a phase."""
    now = iter([100, 100, 101, 104, 106, 107, 108, 110, 111, 112])  # of each call
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(metrics.time, "time", lambda: 1000.0)  # 900 s later than the other clock
    clock = PhaseClock()
    with clock.phase("train"):  # 101 to 104
        pass
    with clock.phase("record"):  # from 106 on
        clock.metrics()  # at 107
        clock.of_engines.append(PhaseInterval("rollout", 995.5, 7.0))
        first = clock.pop_timeline(has_engine_ranks=True)
    trainers = [["train", 1.0, 3.0], ["record", 6.0, 1.0]]
    ranks = {"trainers": trainers, "engines": [["rollout", -4.5, 7.0]]}
    assert first == {"start": 1000.0, "seconds": 7.0, "ranks": ranks}
    with clock.phase("eval"):  # at 110, open until the end of the step
        clock.metrics()
        second = clock.pop_timeline(has_engine_ranks=False)
    own = [["record", 0.0, 1.0], ["eval", 3.0, 1.0]]
    assert second == {"start": 1007.0, "seconds": 4.0, "ranks": {"all ranks": own}}


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_that_of_the_tightest_control_group(tmp_path, version):
    """1,000 of the host's MiB at most: 900 of 1,000 are used in the outer group, 200 of files."""
    top = tmp_path / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    limit, used, files = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = {1: "5:cpu:/job\n4:memory,hugetlb:/job/step\n", 2: "0::/job/step\n"}
    (tmp_path / "proc/self/cgroup").write_text(lines[version])
    unlimited = "9223372036854771712" if version == 1 else "max"
    for folder, value in ((top / "job/step", unlimited), (top / "job", str(1000 << 20))):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{value}\n")
        (folder / used).write_text(f"{900 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{files} {200 << 20}\n")
    assert free_memory(tmp_path) == 300 << 20
    shutil.rmtree(top / "job")  # without limits
    assert free_memory(tmp_path) > 300 << 20


def test_warning_comes_before_the_memory_of_the_host_ends():
    """A leak of 1 MiB a step is named 200 steps before, at half of them, and so on; noise never."""
    trend, still = HostMemoryTrend(steps=5000), HostMemoryTrend(steps=5000)
    named = []
    for step in range(1, 1024):
        noise = (-1) ** step / 100
        assert still.warning(step, 8 + noise) is None
        if (text := trend.warning(step, (1024 - step) / 1024)) is not None:
            named.append(1024 - step)
            assert f"ends in about {1024 - step} steps" in text and "1.0 MiB less" in text
    np.testing.assert_allclose(named[:3], [200, 100, 50], atol=1)  # rounding of the line
    short = HostMemoryTrend(steps=300)
    assert not any(short.warning(step, (1024 - step) / 1024) for step in range(1, 301))


def test_ranks_that_stay_slower_than_others_are_named():
    def warned(rows, ranks=lambda n: (n,)):
        engine, found = SlowRanks("generate"), {}
        for number, row in enumerate(rows, 1):
            text = engine.warning({ranks(n): seconds for n, seconds in enumerate(row)})
            found |= {number: text} if text else {}
        return found

    slow = [[2.0, 20.0, 2.2, 1.9]] * 24
    found = warned(slow)
    assert list(found) == [3, 6, 12, 24]
    assert "rank 1 needed 20.0 s to generate, the others 2.0 s" in found[3]
    assert "ranks 3 to 5 needed" in warned(slow, lambda n: (3 * n, 3 * n + 1, 3 * n + 2))[3]
    assert "ranks 1, 5 needed" in warned(slow, lambda n: (n, n + 4))[3]  # pipeline stages
    assert list(warned([slow[0], (), (0.0,) * 4, *slow[:2]])) == [5]  # steps without generation
    assert list(warned([[1.0, 30.0], [30.0, 1.0]] * 9)) == []  # a long response here and there
    assert list(warned([*slow[:2], [2.0] * 4, *slow[:2]])) == []
    assert list(warned([[0.01, 0.5]] * 9 + [[9.0]] * 9 + [[10.0, 20.0]] * 9)) == []
