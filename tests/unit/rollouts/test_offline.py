"""Rollouts from files: read as they were written, grouped, and refused with the row's name."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import ConfigError, parse_config
from megatron_rl.data.token_rows import is_local
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import UserError
from megatron_rl.objectives import build_objective
from megatron_rl.rollouts import offline
from megatron_rl.rollouts.batch_metrics import batch_metrics
from megatron_rl.rollouts.offline import OfflineRollouts, describe_thinned
from megatron_rl.rollouts.rollout_batch import build_rollout_batch
from megatron_rl.rollouts.rollout_files import describe_unread, read_rows
from megatron_rl.rollouts.schedule import LagClock
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.types import GradeResult, Prompt, PromptSlot, Response, Rollout
from tests.ranks import run_ranks


class Letters:
    """A tokenizer of letters: a prompt is "<", its text and ">"; 0 ends a response."""

    chat_template = "there is one"
    eos_token_id = 0

    def __len__(self):
        return 100

    def apply_chat_template(self, chat, **options):
        return "<" + chat[-1]["content"] + ">"

    def __call__(self, texts, **options):
        if isinstance(texts, str):
            return {"input_ids": [ord(letter) - 40 for letter in texts]}
        return {"input_ids": [self(text)["input_ids"] for text in texts]}

    def decode(self, ids, **options):
        return "".join(chr(token + 40) for token in ids)


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    monkeypatch.setattr(offline, "load_tokenizer", lambda folder, **options: Letters())


def config(path, **sections):
    values = {
        "model": {"path": "m"},
        "offline": {"rollouts": str(path)},
        "data": {"max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 2, "responses_per_prompt": 2, "max_response_tokens": 8},
        "trainer": {"minibatches": 1},
    }
    for name, given in sections.items():
        values[name] = values.get(name, {}) | given if isinstance(given, dict) else given
    return parse_config(values)


def read_rollouts(settings):
    """All rollouts with their log-probs, after the check that rank 0 makes."""
    rollouts = OfflineRollouts.open(settings)
    rollouts.check()
    found = list(rollouts.read(range(int(rollouts.ends[-1]))))
    return found, [rollout.response.behavior_logprobs for rollout in found]


def groups_of(settings, slots, start, step, *, updates):
    return OfflineRollouts.open(settings).groups(
        slots, start, step, updates=updates, topology=Topology.single()
    )


def table(path, **changes):
    columns = {
        "prompt": ["2+2", "2+2", "3+3", "3+3"],
        "response": ["4", "5", "6", "66"],
        "reward": [1.0, 0.0, 1.0, 0.0],
        "rollout_logprobs": [[-0.5, -0.1], [-1.5, -0.1], [-0.25, -0.1], [-0.5, -1.0, -0.1]],
    }
    pq.write_table(pa.table(columns | changes), path)
    return path


def test_any_parquet_of_prompts_responses_rewards_and_log_probs(tmp_path):
    settings = config(table(tmp_path / "data.parquet"))
    rollouts, logprobs = read_rollouts(settings)
    # "<2+2>" is 20, 10, 3, 10, 22; "66" and the end 14, 14, 0.
    assert rollouts[0].prompt.token_ids == (20, 10, 3, 10, 22)
    assert rollouts[3].response.token_ids.tolist() == [14, 14, 0]
    assert [r.grade_result.reward for r in rollouts] == [1, 0, 1, 0]
    assert logprobs[3].tolist() == pytest.approx([-0.5, -1.0, -0.1])
    slots = [PromptSlot(2, 0), PromptSlot(2, 1)]
    groups = groups_of(
        settings, slots, 1, 2, updates=7
    )  # group 1 of the run, then the first one again
    assert [g.rollouts[0].prompt.token_ids[1] for g in groups] == [11, 10]
    assert [(g.slot, g.generated_at_step, g.updates) for g in groups] == [(s, 2, 7) for s in slots]
    assert groups[0].behavior_logprobs[1].tolist() == logprobs[3].tolist()
    assert groups[0].advantages.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


def test_rollouts_of_run_are_read_back_unchanged(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    written, advantages, logprobs = [], [], []
    for place in range(4):
        prompt = Prompt(
            place // 2, ({"role": "user", "content": "?"},), (5, 6 + place // 2), "1", "s"
        )
        response = Response(
            place // 2, place % 2, np.array([7, 8 + place, 0], np.int32),
            np.full(3, -0.3, np.float32), "text", "length" if place == 3 else "stop", 4,
            mask_ids=np.array([7, 1, 8 + place, 0], np.int32),
            mask_counts=np.array([2, 1, 1], np.int32),
        )  # fmt: skip
        logprobs.append(np.array([-0.1, -0.2, -0.3 - place], np.float32))
        response = replace(response, behavior_logprobs=logprobs[-1])
        written.append(Rollout(prompt, response, GradeResult(float(place % 2), "equal", None)))
        advantages.append(0.5)
    for step in (1, 2):
        directory.write_rollouts(
            step,
            written,
            advantages=advantages,
            sampled=[False, False, True, True],
        )
    assert describe_thinned(config(tmp_path / "run")) == ""
    rollouts, found = read_rollouts(config(tmp_path / "run"))
    assert len(rollouts) == 8
    for place, rollout in enumerate(rollouts):
        like = written[place % 4]
        assert rollout.prompt.token_ids == like.prompt.token_ids
        assert rollout.response.token_ids.tolist() == like.response.token_ids.tolist()
        assert rollout.response.mask_ids.tolist() == like.response.mask_ids.tolist()
        assert rollout.response.mask_counts.tolist() == [2, 1, 1]
        assert rollout.response.finish_reason == like.response.finish_reason
        # The 4 that was written is a version of that run.
        assert (rollout.response.sample_index, rollout.response.weight_version) == (place % 2, -1)
        assert rollout.grade_result.reward == like.grade_result.reward
        assert found[place].tolist() == logprobs[place % 4].tolist()  # not the engine's -0.3
    directory.thin_rollouts([1])
    rollouts, _ = read_rollouts(config(tmp_path / "run"))
    assert [rollout.prompt.index for rollout in rollouts] == [1, 1, 0, 0, 1, 1]
    assert describe_thinned(config(tmp_path / "run")).startswith("; 1 of 2 files have only a sam")


def test_conversations_of_run_are_read_back_with_observations(tmp_path):
    (tmp_path / "run").mkdir()
    directory = RunDirectory(tmp_path / "run")
    prompt = Prompt(0, ({"role": "user", "content": "?"},), (5, 6), "1", "s")
    response = Response(
        0, 0, np.array([7, 50, 51, 8, 0], np.int32), np.full(3, -0.3, np.float32), "last", "stop",
        4, observed=((1, 3),), restarts=(1,), messages=({"role": "assistant", "content": "a"},),
    )  # fmt: skip
    logprobs = np.array([-0.1, -0.2, -0.3], np.float32)
    response = replace(response, behavior_logprobs=logprobs)
    rollout = Rollout(prompt, response, GradeResult(0.9, "", None, turn_rewards=[0.9, 0.0]))
    directory.write_rollouts(1, [rollout] * 2, advantages=[0.5] * 2)
    rollouts, found = read_rollouts(config(tmp_path / "run"))
    again = rollouts[0].response
    for name in ("observed", "restarts", "messages"):
        assert getattr(again, name) == getattr(response, name)
    assert (again.length, again.turns) == (3, 2) and found[0].tolist() == logprobs.tolist()
    assert again.own.tolist() == [True, False, False, True, True]
    grade = rollouts[0].grade_result  # the file has the sum as a float32
    assert (grade.turn_rewards, grade.reward) == ([0.9, 0.0], 0.9)


def test_rewards_of_turns_in_float32_have_the_sum_of_the_reward():
    """Their rounding errors add up, however small the sum is."""
    turns = [float(np.float32(100.1)), -100.0] * 100
    reward = float(np.float32(10.0))
    assert offline._turn_rewards(turns, 200, reward) == turns
    with pytest.raises(UserError, match=r"sum to 9.99985, but reward is 10.1"):
        offline._turn_rewards(turns, 200, 10.1)


RANGES = [[{"first": 1, "end": 2}]]  # of the 2 tokens of "4" and its end: no turn follows


@pytest.mark.parametrize(
    ("changes", "sections", "message"),
    [
        (
            {"token_ids": [[1, 2]] * 4, "observed": RANGES * 4},
            {},
            r"row 0: observed is \[\(1, 2\)\] for 2 tokens; its ranges must be in order",
        ),
        (
            {
                "token_ids": [[1, 2, 3]] * 4,
                "observed": RANGES * 4,
                "rollout_logprobs": [[-0.5, -0.1, -0.1]] * 4,
            },
            {},
            r"row 0: rollout_logprobs has 3 numbers for 2 sampled tokens",
        ),
        (
            {"turn_rewards": [[1.0, 0.0]] * 4},
            {},
            r"row 0: turn_rewards is \[1.0, 0.0\] for 1 turns",
        ),
        ({"turn_rewards": [[0.9]] * 4}, {}, r"row 0: turn_rewards sum to 0.9, but reward is 1"),
        (
            {"mask_ids": [[12, 3, 0]] * 4, "mask_counts": [[2, 1]] * 4},  # 12, 0 is "4" and its end
            {},
            r"row 1: mask_counts has 2 values that sum to 3, for 2 sampled tokens and 3 ids",
        ),
        ({"restarts": [[1]] * 4}, {}, r"row 0: restarts is \[1\]; each must begin an observ"),
        ({"reward": [1.0, None, 1.0, 0.0]}, {}, r"row 1: reward is None: it must be a finite"),
        ({"response": ["4", "5", "6", "6" * 20]}, {}, r"row 3: prompt and response have 26 tokens"),
        ({"rollout_logprobs": [[-0.5]] * 4}, {}, r"row 0: rollout_logprobs has 1 numbers for 2"),
        ({"rollout_logprobs": [[0.5, 0.0]] * 4}, {}, r"row 0: rollout_logprobs .* not above 0"),
        ({"prompt": ["1", "2", "3", "3"]}, {}, r"rows 0 to 1 answer 2 prompts"),
        ({}, {"rollout": {"responses_per_prompt": 3}}, r"4 rows, no multiple of rollout\.resp"),
        ({"token_ids": [[1, 200]] * 4}, {}, r"row 0: a token lies outside the tokenizer's 100"),
        ({"token_ids": [[1.5, 2.0]] * 4}, {}, r"row 0: token_ids and prompt_token_ids must be"),
        ({"finish_reason": ["abort"] * 4}, {}, r"row 0: finish_reason is 'abort'; it must be one"),
        ({"prompt_index": [0, 0, 1, 2]}, {}, r"answer one prompt and have prompt_index 1, 2; gi"),
        ({"prompt_index": ["a"] * 4}, {}, r"row 0: prompt_index must be a whole number from 0"),
        ({"rewards": [[1.0]] * 4}, {}, r"row 0: rewards must be a struct of numbers by name"),
        ({"weight": [1.0, 0.0, 1.0, 1.0]}, {}, r"row 1: has weight=0\.0, which would have no eff"),
        ({"page": [b"GIF89a"] * 4}, {}, r"row 0: has a value in the column page; models here"),
    ],
)
def test_unusable_rows_are_named(tmp_path, changes, sections, message):
    with pytest.raises(ConfigError, match=message):
        read_rollouts(config(table(tmp_path / "data.parquet", **changes), **sections))


def test_words_for_the_end_and_columns_of_other_programs(tmp_path, monkeypatch):
    """A file of another program: its words for a cut response, its system messages, its columns."""
    ends = ["stop", "max_tokens", "LENGTH", None]
    columns = {"finish_reason": ends, "score": [1, 2, 3, 4], "advantage": [0.5] * 4}
    logprobs = [[-0.5, -0.1], [-0.5], [-0.5], [-0.5, -0.1, -0.1]]  # a cut response has no end
    path = table(tmp_path / "data.parquet", **columns, rollout_logprobs=logprobs)
    rollouts, _ = read_rollouts(config(path))
    assert [one.response.finish_reason for one in rollouts] == ["stop", "length", "length", "stop"]
    assert describe_unread(path).endswith("columns that nothing reads, with their rows: score (4)")
    assert describe_unread(path, further=["score"]) == ""
    monkeypatch.setattr(Letters, "apply_chat_template", lambda self, chat, **options: "<".join(
        one["content"] for one in chat))  # fmt: skip
    system = table(tmp_path / "system.parquet", system=["+="] * 4)
    assert read_rollouts(config(system))[0][0].prompt.messages[0]["content"] == "+="


def test_settings_that_the_files_leave_without_effect_are_named(tmp_path):
    given = {"reward": {"verifier": "a:b"}, "rollout": {"stop": ["end"], "max_num_seqs": 9},
             "data": {"train": "t.jsonl"}, "workers": {"variables": ["KEY"]}}  # fmt: skip
    line = offline.describe_unused(config(tmp_path, **given))
    assert line == (
        "; no effect: data.train, reward.verifier, rollout.stop, rollout.max_num_seqs, "
        "workers.variables (rewards and responses come from the files)"
    )
    assert not offline.describe_unused(config(tmp_path))


def test_file_without_log_probs_needs_model_to_compute_them(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pq.read_table(table(path)).drop_columns(["rollout_logprobs"]), path)
    with pytest.raises(ConfigError, match=r"name that model as offline\.behavior"):
        read_rollouts(config(path))
    settings = config(path, offline={"behavior": "some/model"})
    rollouts, logprobs = read_rollouts(settings)
    assert len(rollouts) == 4 and logprobs == [None] * 4
    (group,) = groups_of(settings, [PromptSlot(1, 0)], 0, 1, updates=0)
    assert group.behavior_logprobs == (None, None)


def without_engine(path, **changes):
    """A file with the trainer's log-probs alone."""
    given = pq.read_table(table(path, **changes))
    return pq.write_table(given.rename_columns({"rollout_logprobs": "behavior_logprobs"}), path)


def test_only_texts_need_a_chat_template(tmp_path, monkeypatch):
    """A base model's rollouts with token ids need none, also without `data.template: raw`."""
    monkeypatch.setattr(Letters, "chat_template", None)
    with_ids = config(table(tmp_path / "ids.parquet", prompt_token_ids=[[1, 2]] * 4))
    OfflineRollouts.open(with_ids).check()
    with pytest.raises(ConfigError, match=r"row 0: .*: no chat template; for a base model set"):
        OfflineRollouts.open(config(table(tmp_path / "texts.parquet"))).check()


def test_log_probs_without_engine_are_missing_not_zero(tmp_path):
    path = tmp_path / "data.parquet"
    without_engine(path)
    settings = config(path)
    rollouts, logprobs = read_rollouts(settings)
    assert logprobs[0].tolist() == pytest.approx([-0.5, -0.1])
    assert all(np.isnan(rollout.response.rollout_logprobs).all() for rollout in rollouts)
    slots = [PromptSlot(1, 0), PromptSlot(1, 1)]
    groups = groups_of(settings, slots, 0, 1, updates=0)
    batch = build_rollout_batch(
        groups, config=settings, objective=build_objective("pnpo"), topology=Topology.single()
    )
    batch = batch.by_lag(1)
    assert [pack.rollout_logprobs for pack in batch.packs] == [None]  # no gap to an engine
    assert batch.lags == () and np.isnan(batch_metrics(batch)["rollout/entropy"])
    assert "lag/versions_mean" not in LagClock(1, updates=0).metrics(groups, groups)
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    directory.write_rollouts(1, batch.rollouts, advantages=[0.0] * 4)
    written = pq.read_table(directory.rollouts / "step_000001.parquet")
    assert written["rollout_logprobs"].null_count == 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"behavior": "engine"}, r"behavior=engine needs the engine's log-probs, and 4 responses"),
        ({"objective": {"name": "icepop"}}, r"objective\.name=icepop needs the engine's log-probs"),
    ],
)
def test_missing_engine_log_probs_are_refused_if_needed(tmp_path, sections, message):
    path = tmp_path / "data.parquet"
    without_engine(path)
    with pytest.raises(ConfigError, match=message):
        read_rollouts(config(path, **sections))
    read_rollouts(config(table(path), **sections))


def test_missing_column_or_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no parquet file"):
        read_rollouts(config(tmp_path))
    path = tmp_path / "data.parquet"
    pq.write_table(pq.read_table(table(path)).drop_columns(["reward"]), path)
    with pytest.raises(ConfigError, match=r"has no column reward; it needs"):
        read_rollouts(config(path))


def _rows_of_many(path, rows, tokens=500):
    """Rows of one response each, in blocks of 64, with ids and log-probs."""
    one = {
        "prompt": "2+2", "response": "4", "reward": 1.0, "prompt_token_ids": [20, 10, 22],
        "token_ids": [14] * tokens, "rollout_logprobs": [-0.5] * tokens,
    }  # fmt: skip
    table = pa.Table.from_pylist([one | {"reward": float(row % 7)} for row in range(rows)])
    pq.write_table(table, path, row_group_size=64)
    return path


def test_file_is_read_and_checked_in_small_blocks(tmp_path):
    """640 rows of 1,000 numbers are 20 MB of Python objects (32 bytes each); a block is 2 MB."""
    sections = {
        "rollout": {"responses_per_prompt": 4, "max_response_tokens": 500},
        "trainer": {"steps": 2},
    }
    rollouts = OfflineRollouts.open(
        config(_rows_of_many(tmp_path / "data.parquet", 640), **sections)
    )
    tracemalloc.start()
    rollouts.check()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    groups = rollouts.groups(
        [PromptSlot(1, 0), PromptSlot(1, 1)], 150, 1, updates=0, topology=Topology.single()
    )
    _, of_step = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8e6
    assert of_step < 8e6
    found = [rollout.grade_result.reward for group in groups for rollout in group.rollouts]
    assert found == [float(row % 7) for row in range(600, 608)]


def test_memory_of_arrow_does_not_grow_with_row_group(tmp_path):
    """Other programs may write one group: 4,000 rows of 1,000 numbers that do not compress."""
    numbers = np.random.default_rng(0).random((4000, 1000), np.float32)
    column = pa.FixedSizeListArray.from_arrays(numbers.ravel(), 1000).cast(pa.list_(pa.float32()))
    pq.write_table(pa.table({"numbers": column}), tmp_path / "data.parquet", row_group_size=4000)
    del column
    before, most = pa.total_allocated_bytes(), 0
    for number, row in read_rows(tmp_path / "data.parquet", range(4000)):
        most = max(most, pa.total_allocated_bytes() - before)
        assert number % 500 or np.array_equal(row["numbers"], numbers[number])
    assert (tmp_path / "data.parquet").stat().st_size > 13e6
    assert most < 6e6


def test_rows_are_found_across_blocks_and_files(tmp_path):
    for name in ("a", "b"):
        _rows_of_many(tmp_path / f"{name}.parquet", 150, tokens=2)
    rollouts = OfflineRollouts.open(config(tmp_path))
    places = [0, 1, 63, 64, 149, 150, 151, 299]
    found = [rollout.grade_result.reward for rollout in rollouts.read(places)]
    assert found == [float(place % 150 % 7) for place in places]


def _read_on_ranks(rank, world_size, path):
    offline.load_tokenizer = lambda folder, **options: Letters()
    lines = []
    settings = config(path, trainer={"steps": 2})
    rollouts = OfflineRollouts.load(settings, lines.append)
    groups = rollouts.groups(
        [PromptSlot(1, group) for group in range(3)], 1, 1, updates=0,
        topology=Topology(world_size=world_size, rank=rank, dp_size=world_size, dp_rank=rank),
    )  # fmt: skip
    found = []
    for group in groups:
        for rollout, values in zip(group.rollouts, group.behavior_logprobs, strict=True):
            response = rollout.response
            arrays = (response.token_ids, response.rollout_logprobs, values)
            found.append(
                (response.owner, rollout.prompt.token_ids, rollout.grade_result.reward,
                 response.text, [row.tolist() if is_local(row) else len(row) for row in arrays])
            )  # fmt: skip
    pack = build_rollout_batch(
        groups[:2], config=settings, objective=build_objective("pnpo"),
        topology=Topology(world_size=world_size, rank=rank, dp_size=world_size, dp_rank=rank),
    ).packs[0]  # fmt: skip
    return found, pack.rollout_indices, pack.labels[pack.response_mask].tolist(), lines


def test_every_rank_reads_its_share_and_rank_0_has_everything(tmp_path):
    path = table(tmp_path / "data.parquet")
    alone, _, _, lines = _read_on_ranks(0, 1, str(path))
    assert lines == ["offline: 2 groups of 2, 2 passes"]
    results = run_ranks(_read_on_ranks, 3, str(path))
    for rank, (found, indices, tokens, _) in enumerate(results):
        for place, (one, expected) in enumerate(zip(found, alone, strict=True)):
            assert one[:3] == (place // 2, *expected[1:3])  # group 0 on rank 0, and so on
            if rank in (0, place // 2):
                assert one[3:] == expected[3:]
            else:
                assert one[3:] == ("", [len(row) for row in expected[4]])
        trained = [token for i in indices if i >= 0 for token in alone[i][4][0]]
        assert tokens == trained  # the pack has the tokens of its responses
    assert sorted(i for _, indices, _, _ in results for i in indices if i >= 0) == [0, 1, 2, 3]
