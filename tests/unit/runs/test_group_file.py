"""Groups on disk are read back bit for bit."""

import dataclasses
import math

import numpy as np
import pyarrow.parquet as pq

from megatron_rl.runs.group_file import read_groups, write_groups
from megatron_rl.types import GradeResult, Prompt, PromptGroup, PromptSlot, Response, Rollout


def make_group(step=2, *, rng=None, conversation=False):
    rng = rng or np.random.default_rng(step)
    prompt = Prompt(7, ({"role": "user", "content": "1+1? é\n"},), (5, 6), "2", "toy", '{"a": 1}')
    rollouts = tuple(
        Rollout(
            prompt,
            Response(
                7, sample, rng.integers(0, 99, length, np.int32),
                rng.standard_normal(length).astype(np.float32), "text ü", reason, 3, later,
            ),
            GradeResult(1 / 3, "equal", extracted, sample, {"correct": 1 / 3, "format": 0.1}),
        )
        for sample, (length, reason, extracted, later) in enumerate(
            [(3, "stop", None, ()), (5, "length", "2", ((2, 4), (4, 5)))]
        )
    )  # fmt: skip
    if conversation:
        answer = dataclasses.replace(
            rollouts[1].response,
            rollout_logprobs=rng.standard_normal(2).astype(np.float32),
            mask_ids=rng.integers(0, 99, 5, np.int32),
            mask_counts=np.array([4, 1], np.int32),
            observed=((1, 3), (4, 4)),
            restarts=(1,),
            messages=({"role": "assistant", "content": "é"}, {"role": "tool", "content": "\n"}),
        )
        graded = dataclasses.replace(rollouts[1].grade_result, turn_rewards=[1 / 3, 0.0, 0.0])
        last = dataclasses.replace(rollouts[1], response=answer, grade_result=graded)
        rollouts = (rollouts[0], last)
    behavior, advice = (rng.standard_normal(3).astype(np.float32) for _ in range(2))
    first = dataclasses.replace(
        rollouts[0].response, behavior_logprobs=behavior, further={"advice": advice}
    )
    rollouts = (dataclasses.replace(rollouts[0], response=first), rollouts[1])
    by_turn = tuple(rng.standard_normal(one.response.turns) for one in rollouts)
    return PromptGroup(
        slot=PromptSlot(step, 1),
        rollouts=rollouts,
        advantages=rng.standard_normal(2).astype(np.float32),
        entropy=1 / 3,
        generated_at_step=1,
        updates=12,
        first_trained_at_step=3,
        times_trained=2,
        turn_advantages=tuple(row.astype(np.float32) for row in by_turn) if conversation else (),
    )


def plain(value):
    """Nested plain values; arrays by their dtype and bytes."""
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value))
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, [plain(each) for each in value]
    return value


def test_groups_are_read_back_exactly_and_in_order(tmp_path):
    groups = [make_group(3), make_group(2), make_group(4, conversation=True)]
    write_groups(tmp_path / "buffer.parquet", groups)
    assert plain(read_groups(tmp_path / "buffer.parquet")) == plain(groups)


def test_groups_of_earlier_release_have_one_turn(tmp_path):
    file = tmp_path / "buffer.parquet"
    write_groups(file, [make_group()])
    table = pq.read_table(file).drop_columns(
        ["observed", "messages", "turn_advantages", "restarts"]
    )
    pq.write_table(table, file, write_page_checksum=True)
    assert plain(read_groups(file)) == plain([make_group()])


def test_missing_values_stay_missing(tmp_path):
    group = dataclasses.replace(make_group(), entropy=math.nan)
    group = group.with_column("behavior_logprobs", [None, None])
    write_groups(tmp_path / "buffer.parquet", [group])
    (read,) = read_groups(tmp_path / "buffer.parquet")
    assert read.behavior_logprobs == (None, None) and math.isnan(read.entropy)
