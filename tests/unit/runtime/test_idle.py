"""Idle time counts looks, so that a suspended job is not idle."""

from megatron_rl.runtime.idle import IdleTime


def test_time_between_two_looks_counts_up_to_a_quarter():
    now = [0.0]
    idle = IdleTime(40.0, clock=lambda: now[0])

    def look(seconds):
        now[0] += seconds
        return idle.is_over()

    assert [look(9.0) for _ in range(5)] == [False, False, False, False, True]
    idle.restart()
    assert not look(10_000.0) and idle.seconds == 10.0  # was suspended
    assert [look(10.0) for _ in range(3)] == [False, False, True]
    idle.restart()
    assert idle.seconds == 0.0 and not look(1.0)


def test_without_patience_the_first_look_is_over():
    assert IdleTime(0.0).is_over()
