"""Tests of running requests: errors, requests to stop and stalls leave the engine idle."""

from types import SimpleNamespace

import pytest

from megatron_rl.engine import requests as engine_requests
from megatron_rl.engine.engine import GenerationStopped
from megatron_rl.engine.requests import SequenceRequest


class ScriptedCore:
    """Fake engine core that finishes one request per step."""

    def __init__(self):
        self.waiting, self.aborted = [], []

    def add_request(self, name, prompt, params, lora_request):
        self.waiting.append(name)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        return [SimpleNamespace(request_id=self.waiting.pop(0), finished=True)]

    def abort_request(self, names):
        self.aborted = names


@pytest.mark.parametrize(("own", "message"), [(True, "graded"), (False, "another rank")])
def test_run_requests_error_of_one_rank_stops_all_at_next_poll(monkeypatch, own, message):
    polls = []

    def poll(stalled, failed, stopped):  # the other rank has failed by the second poll
        polls.append(failed)
        return stalled, failed or (not own and len(polls) == 2), stopped

    def on_finished(position, output):
        if own and position == 2:
            raise ValueError("cannot be graded")

    monkeypatch.setattr(engine_requests, "any_rank_of_engine", poll)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine_requests.run_requests(core, requests, stall_limit=60.0, on_finished=on_finished)
    assert polls == [False, own]
    assert len(core.aborted) == 20 - engine_requests.POLL_INTERVAL_STEPS


def test_run_requests_stops_at_next_poll_when_requested(monkeypatch):
    monkeypatch.setattr(engine_requests, "any_rank_of_engine", lambda *reasons: reasons)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    finished = []
    with pytest.raises(GenerationStopped):
        engine_requests.run_requests(
            core, requests, stall_limit=60.0,
            on_finished=lambda position, _: finished.append(position),
            should_stop=lambda: len(finished) > 0,
        )  # fmt: skip
    assert finished == list(range(engine_requests.POLL_INTERVAL_STEPS))
    assert len(core.aborted) == 20 - engine_requests.POLL_INTERVAL_STEPS


def test_run_requests_without_finished_response_raises_and_aborts(monkeypatch):
    monkeypatch.setattr(engine_requests, "any_rank_of_engine", lambda *reasons: reasons)
    core, requests = ScriptedCore(), [SequenceRequest(i, (1,), None) for i in range(20)]
    core.step = list
    with pytest.raises(
        TimeoutError, match=r"0 of 20 responses .* none in the last 0 s: the engine"
    ):
        engine_requests.run_requests(core, requests, stall_limit=0.0, on_finished=print)
    assert len(core.aborted) == 20
