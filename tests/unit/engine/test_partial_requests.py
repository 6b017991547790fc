"""Tests of the assignment of unfinished responses to engines, and of merging their outputs."""

from dataclasses import replace

import numpy as np

from megatron_rl.engine.engine import RolloutWindow
from megatron_rl.engine.partial_requests import assign_requests, merge_outputs
from megatron_rl.types import Prompt, Response, SamplingSettings


def make_part(count, *, seed, started=()):
    prompts = [Prompt(10 + i, (), (5,), "", "") for i in range(count)]
    return RolloutWindow(prompts, 2, SamplingSettings(1.0, 1.0, 9, seed), tokens=4, started=started)


def response(prompt, sample, length, reason, later=()):
    tokens = np.arange(length, dtype=np.int32)
    return Response(prompt, sample, tokens, tokens.astype(np.float32), "", reason, 3, later)


def generated(position, length, reason="unfinished", *, version):
    """A position, and its response of one window to the prompts of `make_part`."""
    tokens, (prompt, sample) = np.arange(length, dtype=np.int32), divmod(position % 2, 2)
    return position, Response(
        10 + prompt, sample, tokens, tokens.astype(np.float32), "", reason, version
    )


def test_assign_requests_returns_unfinished_responses_of_own_prompts():
    started = [
        response(10, 0, 2, "unfinished"), response(10, 1, 1, "stop"),
        response(11, 0, 2, "unfinished"), response(11, 1, 2, "unfinished"),
    ]  # fmt: skip
    parts = [make_part(2, seed=1, started=started), make_part(3, seed=2)]
    positions = [[item[0] for item in assign_requests(parts, engine=e, engines=2)] for e in (0, 1)]
    # Prompt 0 of the first part without its finished sample, prompts 0 and 2 of the second.
    assert positions == [[0, 4, 5, 8, 9], [2, 3, 6, 7]]
    keys = [item[1] for e in (0, 1) for item in assign_requests(parts, engine=e, engines=2)]
    assert len(set(keys)) == len(keys)  # keys are unique


def test_merge_outputs_adds_versions_and_keeps_finished_responses():
    started = [response(10, 0, 2, "unfinished"), response(10, 1, 1, "stop")]
    parts = [make_part(1, seed=1, started=started), make_part(1, seed=2)]
    new = [generated(0, 4, "stop", version=5), generated(2, 1, version=5)]
    new += [generated(3, 4, version=3)]  # one ends with the adapters that it began with
    (first, second) = merge_outputs(parts, dict(new))
    assert first[0].versions == ((0, 3), (2, 5)) and first[0].finish_reason == "stop"
    assert first[1] is started[1]
    assert [merged.versions for merged in second] == [((0, 5),), ((0, 3),)]
    assert [(merged.prompt_index, merged.sample_index) for merged in second] == [(10, 0), (10, 1)]


def test_merge_outputs_without_new_version_or_tokens_adds_no_range():
    started = [response(10, 0, 2, "unfinished", ((1, 4),)), response(10, 1, 2, "unfinished")]
    new = [generated(0, 3, version=4), generated(1, 2, version=4)]
    (same,) = merge_outputs([make_part(1, seed=1, started=started)], dict(new))
    assert same[0].versions == ((0, 3), (1, 4))
    assert same[1].versions == ((0, 3),)


def test_response_of_a_checkpoint_belongs_to_the_rank_that_continued_it():
    started = [response(10, 0, 2, "unfinished"), response(10, 1, 1, "stop")]
    place, new = generated(0, 3, version=4)
    new = {place: replace(new, owner=1)}
    ((continued, finished),) = merge_outputs([make_part(1, seed=1, started=started)], dict(new))
    assert continued.owner == 1 and finished.owner == -1  # every rank has the finished one
