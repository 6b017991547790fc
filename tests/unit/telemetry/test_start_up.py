"""The parts of the start-up: all of the time since the command began, none of it twice."""

import pytest

from megatron_rl.runtime.processes import command_start
from megatron_rl.telemetry.start_up import StartUp


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
