"""Groups that teach nothing are replaced, within bounds, and everything is counted."""

import numpy as np
import pyarrow.parquet as pq

from megatron_rl.rollouts.engine_source import DynamicSampling, GradedGroups
from megatron_rl.runs.files import read_metrics, read_rows
from megatron_rl.runs.group_file import read_groups
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import GradeResult, Prompt, PromptSlot, Response, Rollout
from tests.unit.trainer.scripted import ScriptedEngine, run_loop
from tests.unit.trainer.test_lag import Saver, learned


def group(name, *rewards):
    """One response of three tokens for each reward."""
    prompt = Prompt(name, (), (1,), "", "x")
    tokens, logprobs = np.zeros(3, np.int32), np.zeros(3, np.float32)
    return [
        Rollout(
            prompt, Response(name, i, tokens, logprobs, "", "stop", 0), GradeResult(r, "", None)
        )
        for i, r in enumerate(rewards)
    ]


def good(name):
    return group(name, 1.0, 0.0)


def bad(name):
    return group(name, 1.0, 1.0)


def fill(first, rounds, *, allowed, spare=()):
    """Return the groups in the slots, their names, the requests, the costs and the spare groups."""
    sent, answers = [], iter(rounds)

    def ask(requests):
        (request,) = requests
        if request.number == 0:
            assert request.prompts == len(request.slots) == len(first)
            return GradedGroups([first], (3.0, 4.0))
        sent.append((request.number, request.prompts))
        return GradedGroups([next(answers)], (1.0, 2.0))

    sampling, spare = DynamicSampling(allowed), list(spare)
    slots = [PromptSlot(1, place) for place in range(len(first))]
    filled = sampling.fill([slots], ask=ask, spare=spare)
    names = [[r.prompt.index for r in one.rollouts][::2] for one in filled]
    return filled, names, sent, sampling.pop_costs(), spare


def test_zero_rounds_request_and_count_nothing():
    filled, names, requests, costs, _ = fill([good(0), bad(1)], [], allowed=0)
    assert (names, requests, costs) == ([[0, 1]], [], {})
    assert filled[0].engine_seconds == (3.0, 4.0)


def test_good_groups_keep_slots_and_extra_groups_fill_gaps_in_order():
    # Two of four are good, so two more are likely to take four; three of those are good.
    first = [bad(0), good(1), bad(2), good(3)]
    spare = [PromptSlot(2, 3), PromptSlot(2, 2)]
    filled, names, requests, costs, rest = fill(
        first, [[good(10), bad(11), good(12), good(13)]], allowed=3, spare=spare
    )
    assert requests == [(1, 4)]
    assert names == [[10, 1, 12, 3], [13]]
    assert filled[1].slots == [PromptSlot(2, 3)] and rest == [PromptSlot(2, 2)]
    assert filled[0].engine_seconds == (4.0, 6.0) and filled[1].engine_seconds == (0.0, 0.0)
    assert costs == {
        "dynamic/rounds": 1,
        "dynamic/groups_generated": 8,
        "dynamic/groups_kept_for_later": 1,
        "dynamic/groups_lacking": 0,
        "dynamic/tokens_dropped": 3 * 6,  # 0, 2 and 11: three groups of two times three tokens
        "dynamic/dropped_length_mean": 3,
    }


def test_rounds_are_bounded_and_missing_groups_stay_missing():
    first = [bad(0), bad(1), good(2)]
    # One of three is good: two more take six, of which a round asks for three.
    _, names, requests, costs, _ = fill(
        first, [[bad(10), bad(11), bad(12)], [bad(20), good(21), bad(22)]], allowed=2
    )
    assert requests == [(1, 3), (2, 3)]
    assert names == [[21, 1, 2]]
    assert (costs["dynamic/rounds"], costs["dynamic/groups_lacking"]) == (2, 1)
    assert costs["dynamic/tokens_dropped"] == 6 * 6  # 0, three of round 1, two of round 2


def test_round_requests_expected_number_of_prompts():
    # Three of four are good, and one is lacking: 1 / (3 / 4), rounded up, are two prompts. Of six
    # then, three are good: again one is lacking, and again two are requests for.
    first = [bad(0), good(1), good(2), good(3)]
    _, names, requests, costs, _ = fill(first, [[bad(10), bad(11)], [good(20), bad(21)]], allowed=3)
    assert requests == [(1, 2), (2, 2)]
    assert names == [[20, 1, 2, 3]]
    assert costs["dynamic/groups_generated"] == 8


def run(folder, **options):
    sections = {"dynamic_sampling": {"rounds": 2}}
    return run_loop(folder, trainer={"steps": 4}, sections=sections, **options)


def test_parts_filled_together_equal_parts_filled_alone():
    """The slots of three steps: the first lacks one group, the second none, the third both."""
    answers = {
        (1, 0): [bad(0), good(1)], (1, 1): [bad(10), bad(11)], (1, 2): [good(12), good(13)],
        (2, 0): [good(2), good(3)],
        (3, 0): [bad(4), bad(5)], (3, 1): [good(14), bad(15)], (3, 2): [good(16), good(17)],
    }  # fmt: skip
    calls = []

    def ask(requests):
        calls.append([(slots[0].step, number, prompts) for slots, number, prompts in requests])
        groups = [answers[slots[0].step, number] for slots, number, _ in requests]
        return GradedGroups(groups, (1.0, 2.0))

    def fill_parts(*steps):
        sampling, spare = DynamicSampling(2), [PromptSlot(4, 0)]
        parts = [[PromptSlot(step, 0), PromptSlot(step, 1)] for step in steps]
        filled = sampling.fill(parts, ask=ask, spare=spare)
        messages = [([*one.slots], [r.prompt.index for r in one.rollouts][::2]) for one in filled]
        return filled, messages, sampling.pop_costs()

    filled, together, costs = fill_parts(1, 2, 3)
    # One of two is good in step 1: one more is likely to take two. After four, it takes four, of
    # which a round asks for two.
    assert calls == [
        [(1, 0, 2), (2, 0, 2), (3, 0, 2)],
        [(1, 1, 2), (3, 1, 2)],
        [(1, 2, 2), (3, 2, 2)],
    ]
    assert together == [
        ([PromptSlot(1, 0), PromptSlot(1, 1)], [12, 1]), ([PromptSlot(4, 0)], [13]),
        ([PromptSlot(2, 0), PromptSlot(2, 1)], [2, 3]), ([PromptSlot(3, 0), PromptSlot(3, 1)], [14,
        16]),
    ]  # fmt: skip
    assert [one.engine_seconds for one in filled] == [(3.0, 6.0), *[(0.0, 0.0)] * 3]
    apart = [fill_parts(step) for step in (1, 2, 3)]
    assert [messages[0] for _, messages, _ in apart] == [together[0], together[2], together[3]]
    for key in ("dynamic/rounds", "dynamic/groups_generated", "dynamic/groups_lacking"):
        assert costs[key] == sum(one[key] for _, _, one in apart)


def test_run_with_only_good_groups_equals_plain_run(tmp_path):
    run_loop(tmp_path / "plain", trainer={"steps": 4})
    run(tmp_path / "dynamic")
    assert [
        {key: value for key, value in row.items() if not key.startswith("dynamic/")}
        for row in learned(tmp_path / "dynamic")
    ] == learned(tmp_path / "plain")


def test_run_trains_on_groups_with_signal_and_keeps_spares(tmp_path):
    _, trainer = run(tmp_path / "run", solved=(0, 1, 2))
    rows = read_metrics(tmp_path / "run")[1:]
    kept = sum(row.get("dynamic/groups_kept_for_later", 0) for row in rows)
    later = [lag for row in read_rows(tmp_path / "run" / "schedule.jsonl") for lag in row["lag"]]
    assert kept == sum(lag > 0 for lag in later) > 0  # each is trained one step later
    for step, row in enumerate(rows, start=1):
        table = pq.read_table(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet")
        assert table.num_rows == 16
        groups = np.array(table["reward"].to_pylist()).reshape(4, 4)
        lacking = row.get("dynamic/groups_lacking", 0)  # a step may find all its slots filled
        assert sum(len(set(group)) == 1 for group in groups) == lacking
        # Two tokens to a response: generated tokens are in the buffer, trained or dropped.
        assert row.get("rollout/tokens", 0) == row.get("dynamic/groups_generated", 0) * 4 * 2
    assert not trainer.run.buffer.groups


def test_calls_that_fill_one_step_ask_for_different_prompts(tmp_path):
    """A drawn lag fills the slots of step 3 in up to three calls, which asked for the same."""
    requests = []

    class Noting(ScriptedEngine):
        def generate(self, prompts, *, sampling, **options):
            if isinstance(sampling, list):  # else an evaluation
                requests.extend(
                    (one.seed, prompt.index) for one, prompt in zip(sampling, prompts, strict=True)
                )
            return super().generate(prompts, sampling=sampling, **options)

    run_loop(
        tmp_path, trainer={"steps": 6}, solved=range(8), engine=Noting,
        sections={
            "dynamic_sampling": {"rounds": 1},
            "lag": {
                "policy": "research.lag_policies:UniformLag",
                "settings": {"low": 0, "high": 2},
            },
        },
    )  # fmt: skip
    for use in ("rollout",), ("rollout", 1):
        for step in range(1, 7):
            seed = derive_seed(42, use[0], step, *use[1:])
            prompts = [index for of, index in requests if of == seed]
            assert len(prompts) == len(set(prompts)) == 4


def test_resumed_run_uses_kept_groups(tmp_path, done=2):
    run(tmp_path / "whole", solved=(0, 1, 2))
    held: list = []
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "buffer.parquet"
    run(tmp_path / "part", solved=(0, 1, 2), checkpoints=Saver(done, held, file))
    run(
        tmp_path / "rest", solved=(0, 1, 2), done=done, updates=6 * done, held=read_groups(file)
    )  # fmt: skip
    assert learned(tmp_path / "rest") == learned(tmp_path / "whole")[1 + done :]
