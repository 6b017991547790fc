"""Lengths, packs and decoding steps, against values worked out by hand."""

from dataclasses import replace
from statistics import fmean

import pytest

from megatron_rl.apps.planning.generation import (
    GRAPHS,
    Answers,
    Engine,
    Workload,
    clipped_lengths,
    engine_sizes,
    share_with_the_longest,
)
from megatron_rl.apps.planning.models import MODELS
from megatron_rl.apps.planning.rates import DEVICES, GIB

SHAPE, H20 = MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], DEVICES["h20"]
WORKLOAD = Workload(
    prompts=256, samples=8, minibatches=4, epochs=1, max_prompt=1024, max_response=15360,
    mean_prompt=160, mean_response=7000, max_num_seqs=256,
)  # fmt: skip


def test_clipped_lengths_have_given_mean_and_limit():
    lengths = clipped_lengths(2048, 7000, 15360)
    assert len(lengths) == 2048 and max(lengths) == 15360
    assert fmean(lengths) == pytest.approx(7000, abs=1)
    assert sum(length == 15360 for length in lengths) > 100  # truncated responses
    with pytest.raises(ValueError, match="16000 tokens is impossible with a limit of 15360"):
        clipped_lengths(8, 16000, 15360)


def test_packs_contain_every_token_of_minibatch_once():
    packs = WORKLOAD.packs(ranks=1, budget=16384, alignment=2)
    lengths = [160 + length - 1 for length in WORKLOAD.response_lengths()[:512]]
    padded = [length + length % 2 for length in lengths]
    assert packs.count * packs.tokens == pytest.approx(sum(padded))
    assert packs.count * packs.squares == pytest.approx(sum(length**2 for length in padded))
    assert packs.tokens <= 16384


def test_cached_bytes_per_token():
    # 28 layers x 2 groups x 128 x (key and value) x 2 bytes; one group on each of two devices, and
    # still one where four devices share two.
    assert Engine(SHAPE, 1, H20, 0).token_bytes == 28 * 2 * 128 * 2 * 2
    assert Engine(SHAPE, 2, H20, 0).token_bytes == 28 * 1 * 128 * 2 * 2
    assert Engine(SHAPE, 4, H20, 0).token_bytes == 28 * 1 * 128 * 2 * 2


def test_equal_responses_take_as_many_steps_as_tokens():
    equal = replace(WORKLOAD, prompts=4, samples=8, max_response=1000, mean_response=950)
    engine = Engine(SHAPE, 1, H20, 60 * GIB)
    lengths = [100] * 32
    # All 32 run from the first step to the last; contexts grow from 160 to 260, 210 on average.
    expected = 100 * engine.step_seconds(32, 32 * 210)
    assert engine._decode(lengths, equal) == pytest.approx(expected)
    # With half of them at a time: twice the steps.
    halved = replace(equal, max_num_seqs=16)
    assert engine._decode(lengths, halved) == pytest.approx(200 * engine.step_seconds(16, 16 * 210))


def test_windows_of_partial_rollouts_have_every_token_once():
    """A step of four windows continues four rollout batches, each for one window."""
    windows = replace(WORKLOAD, every_tokens=4096)
    lengths = [100, 4096, 5000, 15360]
    requests = windows.requests(lengths)
    assert requests == [
        (12288, (3072,)), (8192, (4096,)), (4096, (904,)), (4096, (4096,)),
        (0, (100,)), (0, (4096,)), (0, (4096,)), (0, (4096,)),
    ]  # fmt: skip
    engine = Engine(SHAPE, 1, H20, 60 * GIB)
    # The first 100 steps have all eight, with 160 tokens of prompt each and what came before.
    before = sum(start for start, _ in requests) + 8 * 160
    expected = 100 * engine.step_seconds(8, before + 8 * 50)
    assert engine._decode([100], windows) < expected < engine._decode(lengths, windows)
    whole = engine.seconds(WORKLOAD, engines=32)
    kept, recomputed = (
        engine.seconds(replace(windows, keeps_cache=keeps), engines=32) for keeps in (True, False)
    )
    assert kept < recomputed and kept < whole
    # Scored by the weights of each window: 100 and 5,000 once or twice, with the prompt.
    scored = replace(windows, prompts=1, samples=1, mean_response=5000)
    assert scored.scored_part == ((160 + 4096) + (160 + 5000)) / (160 + 5000)


def test_conversations_wait_for_answers_and_others_go_on():
    engine = Engine(SHAPE, 1, H20, 60 * GIB)
    load = replace(WORKLOAD, turns=2, answers=Answers(100.0, 100.0))
    # Alone: 50 tokens, 100 s, 50 tokens.
    alone = 50 * engine.step_seconds(1, 160 + 25) + 50 * engine.step_seconds(1, 210 + 25)
    assert engine._decode([100], load) == pytest.approx(alone + 100)
    # Two in a batch of one: the second decodes while the first waits.
    each = replace(load, max_num_seqs=1)
    second = 50 * engine.step_seconds(1, 185)
    assert engine._decode([100, 100], each) == pytest.approx(alone + second + 100)
    # Without seconds, turns change nothing; with more of them it takes longer.
    lengths = list(WORKLOAD.response_lengths()[:64])
    took = [
        engine._decode(lengths, replace(load, answers=answers, turns=turns))
        for answers, turns in (
            (None, 1), (None, 4), (Answers(10, 10), 4), (Answers(20, 20), 4), (Answers(20, 40), 4)
        )
    ]  # fmt: skip
    assert took[0] == took[1] < took[2] < took[3] < took[4]


def test_answers_have_given_mean_and_percentile():
    seconds = sorted(Answers(60.0, 180.0).seconds(20_000))
    assert fmean(seconds) == pytest.approx(60, rel=0.01)
    assert seconds[19_000] == pytest.approx(180, rel=0.01)
    assert set(Answers(5.0, 5.0).seconds(3)) == {5.0}
    with pytest.raises(ValueError, match=r"choose a percentile of 60 to 232\.1 s"):
        Answers(60, 600).seconds(1)


def test_states_of_gated_delta_nets_take_the_cache_of_a_constant_number_of_tokens():
    shape = MODELS["Qwen3.5-35B-A3B"]
    # 30 of 40 layers: 32 states of 128 x 128 in float32, and 3 inputs of the 16 + 16 + 32 heads of
    # 128 in bfloat16. The others cache a key and a value of one head of 256 on each of 4 devices.
    states = 30 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128) / 4
    empty = Engine(shape, 4, H20, 0)
    assert empty.token_bytes == 10 * 2 * 256 * 2
    assert empty.state_tokens == states / 10_240 == 1572.0
    weights = GRAPHS + 2 * engine_sizes(shape, 4).weights
    equal = replace(WORKLOAD, prompts=4, max_response=1000, mean_response=950)
    # Room for 16 of 32 sequences of at most 1,832 cached tokens: twice the steps.
    engine = replace(empty, memory=weights + 10_240 * int(16 * 1832 / 0.95 + 1))
    expected = 200 * engine.step_seconds(16, 16 * (1572 + 210))
    assert engine._decode([100] * 32, equal) == pytest.approx(expected)


def test_simulated_engine_has_longest_response():
    for engines in (1, 8, 32, 256):
        lengths = share_with_the_longest(WORKLOAD, engines)
        assert len(lengths) == 2048 // engines
        assert fmean(lengths) == pytest.approx(7000, rel=0.15)
        few_are_cut = replace(WORKLOAD, mean_response=2000)
        longest = max(few_are_cut.response_lengths())
        assert max(share_with_the_longest(few_are_cut, engines)) == longest


def test_decoding_few_sequences_reads_few_experts():
    engine = Engine(MODELS["Qwen3-30B-A3B"], 1, H20, 80 * GIB)
    # One sequence reads 8 of 128 experts: 1 / 16 of 48 layers x 3 x 2048 x 768 x 128.
    experts = 48 * 3 * 2048 * 768 * 128
    rest = engine._weights_read(1) - experts / 16
    assert engine._weights_read(10_000) == pytest.approx(rest + experts)


def test_key_value_heads_are_replicated_in_engine_with_more_ranks():
    # 4 key-value heads over 8 ranks: each rank stores a whole head instead of half of one, of keys
    # and of values.
    shape = replace(MODELS["Qwen3-235B-A22B"], num_layers=1)
    by_four, by_eight = (engine_sizes(shape, tensor).weights for tensor in (4, 8))
    replicated = 4096 * 2 * 128 + 4096 * 128 + 2 * 128 + 2 * 4096  # heads, router, norms
    assert 2 * by_eight - by_four == pytest.approx(replicated, rel=0.02)


def test_all_reduces_of_engine_over_nodes_use_the_network():
    shape, h100 = MODELS["Qwen3-235B-A22B"], DEVICES["h100"]
    two_nodes, one_node = (
        Engine(shape, 16, replace(h100, per_node=size), 70 * GIB).step_seconds(64, 64 * 1000)
        for size in (8, 16)
    )
    # Two of 64 x 4,096 in bfloat16 in each of 94 layers; each rank sends 15 of 16 of it twice, at
    # 0.8 of 50 or of 450 GB/s, and each call waits 15 us longer.
    sent = 2 * 94 * (2 * 64 * 4096) * 2 * 15 / 16
    expected = sent / 40e9 - sent / 360e9 + 2 * 94 * 15e-6
    assert two_nodes - one_node == pytest.approx(expected)
