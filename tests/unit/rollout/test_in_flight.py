"""Who generates what of parts under way, and what becomes of it."""

import numpy as np

from megatron_rl.rollout.engine import Part
from megatron_rl.rollout.in_flight import asked_of_engine, extended
from megatron_rl.rollout.response_gather import Generated
from megatron_rl.types import Prompt, Response, SamplingSettings


def make_part(count, *, seed, begun=()):
    prompts = [Prompt(10 + i, (), (5,), "", "") for i in range(count)]
    return Part(prompts, 2, SamplingSettings(1.0, 1.0, 9, seed), tokens=4, begun=begun)


def response(prompt, sample, length, reason, later=()):
    tokens = np.arange(length, dtype=np.int32)
    return Response(prompt, sample, tokens, tokens.astype(np.float32), "", reason, 3, later)


def generated(place, length, reason="unfinished"):
    tokens = np.arange(length, dtype=np.int32)
    return Generated(place, tokens, tokens.astype(np.float32), reason, "")


def test_each_engine_goes_on_with_its_prompts_and_with_what_has_not_ended():
    begun = [
        response(10, 0, 2, "unfinished"), response(10, 1, 1, "stop"),
        response(11, 0, 2, "unfinished"), response(11, 1, 2, "unfinished"),
    ]  # fmt: skip
    parts = [make_part(2, seed=1, begun=begun), make_part(3, seed=2)]
    places = [[each[0] for each in asked_of_engine(parts, engine=e, engines=2)] for e in (0, 1)]
    # Prompt 0 of the first part without its ended sample, prompts 0 and 2 of the second; the rest.
    assert places == [[0, 4, 5, 8, 9], [2, 3, 6, 7]]
    keys = [each[1] for e in (0, 1) for each in asked_of_engine(parts, engine=e, engines=2)]
    assert len(set(keys)) == len(keys)  # a response is known by its key


def test_what_is_added_knows_its_version_and_what_has_ended_stays():
    begun = [response(10, 0, 2, "unfinished"), response(10, 1, 1, "stop")]
    parts = [make_part(1, seed=1, begun=begun), make_part(1, seed=2)]
    found = [generated(0, 4, "stop"), generated(2, 1), generated(3, 4)]
    (first, second) = extended(parts, found, version=5)
    assert first[0].versions == ((0, 3), (2, 5)) and first[0].finish_reason == "stop"
    assert first[1] is begun[1]
    assert [one.versions for one in second] == [((0, 5),), ((0, 5),)]
    assert [(one.prompt_index, one.sample_index) for one in second] == [(10, 0), (10, 1)]


def test_the_same_version_twice_and_nothing_new_add_no_range():
    begun = [response(10, 0, 2, "unfinished", ((1, 4),)), response(10, 1, 2, "unfinished")]
    (same,) = extended(
        [make_part(1, seed=1, begun=begun)], [generated(0, 3), generated(1, 2)], version=4
    )
    assert same[0].versions == ((0, 3), (1, 4))
    assert same[1].versions == ((0, 3),)
