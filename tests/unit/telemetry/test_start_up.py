"""The parts of the start-up: all of the time since the process began, none of it twice."""

import psutil
import pytest

from megatron_rl.telemetry.start_up import StartUp


def test_phases_cover_time_since_process_start():
    start = StartUp()
    for part in ("engine_check", "imports", "push"):
        start.ended(part)
    seconds = start.metrics()
    assert list(seconds) == [f"time/start_{part}" for part in ("imports", "engine_check", "push")]
    passed = start._last - psutil.Process().create_time()
    assert sum(seconds.values()) == pytest.approx(passed, abs=1e-3)
    assert "engine check" in str(start)
