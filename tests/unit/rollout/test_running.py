"""An error in taking a response ends the whole engine, after the same step on each of its ranks."""

from types import SimpleNamespace

import pytest

from megatron_rl.rollout import running
from megatron_rl.rollout.engine import GenerationStopped
from megatron_rl.rollout.requests import SequenceRequest


class ScriptedCore:
    """Ends one request in each step."""

    def __init__(self):
        self.waiting, self.aborted = [], []

    def add_request(self, name, prompt, params):
        self.waiting.append(name)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        return [SimpleNamespace(request_id=self.waiting.pop(0), finished=True)]

    def abort_request(self, names):
        self.aborted = names


@pytest.mark.parametrize(("own", "said"), [(True, "judged"), (False, "another rank")])
def test_an_error_of_one_rank_ends_all_at_the_next_look(monkeypatch, own, said):
    looks = []

    def look(late, stalled, failed, stopped):  # the other rank has failed by the second look
        looks.append(failed)
        return late, stalled, failed or (not own and len(looks) == 2), stopped

    def take(place, output):
        if own and place == 2:
            raise ValueError("cannot be judged")

    monkeypatch.setattr(running, "any_rank_of_engine", look)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    with pytest.raises((ValueError, RuntimeError), match=said):
        running.run_requests(core, requests, time_limit=60.0, stall_limit=60.0, on_finished=take)
    assert looks == [False, own]
    assert len(core.aborted) == 20 - running.STEPS_BETWEEN_LOOKS


def test_a_request_to_stop_is_followed_at_the_next_look(monkeypatch):
    monkeypatch.setattr(running, "any_rank_of_engine", lambda *reasons: reasons)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    taken = []
    with pytest.raises(GenerationStopped):
        running.run_requests(
            core, requests, time_limit=60.0, stall_limit=60.0,
            on_finished=lambda place, _: taken.append(place),
            should_stop=lambda: len(taken) > 0,
        )  # fmt: skip
    assert taken == list(range(running.STEPS_BETWEEN_LOOKS))
    assert len(core.aborted) == 20 - running.STEPS_BETWEEN_LOOKS


def test_an_engine_that_finishes_nothing_for_long_is_an_error_and_idle_again(monkeypatch):
    monkeypatch.setattr(running, "any_rank_of_engine", lambda *reasons: reasons)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    core.step = list
    with pytest.raises(
        TimeoutError, match=r"0 of 20 responses .* none in the last 0 s: the engine"
    ):
        running.run_requests(core, requests, time_limit=60.0, stall_limit=0.0, on_finished=print)
    assert len(core.aborted) == 20
