"""Traced responses: the same decisions as in training, and exact encoding."""

import base64

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl.apps.report.runs import find_runs
from megatron_rl.apps.report.traces import (
    Pieces,
    TracedResponse,
    build_histories,
    has_decisions_per_response,
    objective_of,
    read_traced_groups,
    reason_no_decisions,
    replay_constraint,
    spread_out,
)
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import TokenInputs, build_objective
from megatron_rl.objectives.inputs import MinibatchTokens
from megatron_rl.objectives.named import OBJECTIVE_NAMES
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.rollouts import count_thinned
from megatron_rl.types import Denominators
from tests.made_runs import OBSERVED, WORDS, make_run

CONSTRAINED = {"pnpo": {"constraint": {"low": 0.02, "high": 0.03}},
               "gspo": {"constraint": {"low": 0.02, "high": 0.02}}}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n for n in OBJECTIVE_NAMES if has_decisions_per_response(build_objective(n))]
)
def test_replayed_decisions_match_update(name):
    """The fraction of kept tokens and the extreme weights equal the update's statistics."""
    draw = torch.Generator().manual_seed(3)
    objective = build_objective(name, **CONSTRAINED.get(name, {}))
    lengths, rows, responses = (9, 30, 17), [], []
    for place, length in enumerate(lengths):
        before = -torch.rand(length, generator=draw)
        engine = before + 0.5 * torch.randn(length, generator=draw)
        now = before + 0.2 * torch.randn(length, generator=draw)
        advantage = (1.0, -0.5, 0.7)[place]
        rows.append((now, before, torch.full((length,), advantage), engine))
        row = {
            "behavior_logprobs": before.tolist(),
            "rollout_logprobs": engine.tolist(),
            "advantage": advantage,
        }
        responses.append(TracedResponse(row, now[None].numpy()))
    policy, behavior, advantages, engine = (torch.cat(parts) for parts in zip(*rows, strict=True))
    result = objective.resolve(MinibatchTokens.whole(policy - behavior, advantages, behavior))(
        TokenInputs(policy, behavior, advantages, rollout_logprobs=engine),
        layout=SequenceLayout(lengths, torch.ones(sum(lengths), dtype=torch.bool)),
        denominators=Denominators(3.0, float(sum(lengths))),
    )
    metrics = result.statistics.to_metrics()
    replayed = [replay_constraint(response, objective) for response in responses]
    weights, kept = (np.concatenate(parts, axis=1) for parts in zip(*replayed, strict=True))
    if objective.spec.rollout_correction is None:  # counted separately by the update
        assert kept.mean() == pytest.approx(metrics["gate/acceptance"], abs=1e-12)
    else:
        assert kept.mean() < metrics["gate/acceptance"]
    assert weights.max() == pytest.approx(metrics["weight/log_max"], abs=1e-7)
    assert weights.min() == pytest.approx(metrics["weight/log_min"], abs=1e-7)


def test_only_batch_dependent_objectives_have_no_decisions():
    without = {
        name for name in OBJECTIVE_NAMES if not has_decisions_per_response(build_objective(name))
    }
    assert without == {"m2po", "oapl"}  # a minibatch's second moment, and no weight at all


def test_log_probs_in_page_are_exact(tmp_path):
    make_run(tmp_path / "run", steps=3, traced=2)
    [life] = build_histories(find_runs([tmp_path]), megabytes=4)
    assert [group["step"] for group in life["groups"]] == [1, 2, 3]
    [responses] = read_traced_groups(find_runs([tmp_path])[0], 2)
    shown = life["groups"][1]["responses"]
    assert [("trace" in one) for one in shown] == [True, True, False, False]
    for response, one in zip(responses[:2], shown, strict=False):
        trace = one["trace"]
        unpacked = [np.frombuffer(base64.b64decode(line), "<f4") for line in trace["policy"]]
        np.testing.assert_array_equal(np.stack(unpacked), response.policy)
        np.testing.assert_array_equal(
            np.frombuffer(base64.b64decode(trace["behavior"]), "<f4"), response.behavior
        )
        assert trace["pieces"] == [WORDS[token] for token in trace["ids"]]
        assert one["text"] is None and shown[2]["text"]
    assert life["objective"]["bounds"]["scale"] == "sqrt(L/t)"


def test_observations_are_separate_from_policy_tokens(tmp_path):
    """Everything that has a value has one per sampled token; observations have a place alone."""
    make_run(tmp_path / "run", steps=1, traced=2, turns=3)
    make_run(tmp_path / "plain", steps=1, traced=2)
    shown = build_histories(find_runs([tmp_path / "run"]), megabytes=4)[0]["groups"][0]["responses"]
    for one in shown[:2]:
        trace = one["trace"]
        values = np.frombuffer(base64.b64decode(trace["behavior"]), "<f4")
        assert one["turns"] == 3 and one["length"] == len(trace["ids"]) == len(values)
        assert len(trace["pieces"]) == len(trace["kept"][0]) == len(values)
        first, second = np.array_split(np.arange(len(values)), 3)[1:]
        words = WORDS[OBSERVED] * 3
        assert trace["observed"] == [(first[0], words), (second[0], words)]
        assert trace["restarts"] == [second[0]] and one["histories"] == 2
        assert one["turn_advantages"] == [one["advantage"] - turn for turn in range(3)]
        assert OBSERVED not in trace["ids"] or trace["pieces"].count(WORDS[OBSERVED]) < 10
    alone = build_histories(find_runs([tmp_path / "plain"]), megabytes=4)[0]["groups"][0][
        "responses"
    ]
    assert alone[0]["turns"] == 1 and alone[0]["trace"]["observed"] == []
    assert alone[0]["histories"] == 1 and alone[0]["trace"]["restarts"] == []


def test_thinned_rollouts_contain_same_traced_groups(tmp_path):
    make_run(tmp_path / "run", steps=3, traced=2)
    before = build_histories(find_runs([tmp_path]), megabytes=4)
    RunDirectory(tmp_path / "run").thin_rollouts([1, 2])
    assert count_thinned(sorted((tmp_path / "run" / "rollouts").iterdir())) == 2
    assert build_histories(find_runs([tmp_path]), megabytes=4) == before


def test_missing_engine_log_probs_are_nan_and_decisions_remain(tmp_path):
    """The rollouts of a run on offline data may lack the engine's log-probs."""
    make_run(tmp_path / "run", steps=1, traced=1)
    file = tmp_path / "run" / "rollouts" / "step_000001.parquet"
    table = pq.read_table(file)
    place = table.column_names.index("rollout_logprobs")
    nothing = pa.nulls(table.num_rows, pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, "rollout_logprobs", nothing), file)
    [life] = build_histories(find_runs([tmp_path]), megabytes=4)
    trace = life["groups"][0]["responses"][0]["trace"]
    engine = np.frombuffer(base64.b64decode(trace["engine"]), "<f4")
    assert engine.size == len(trace["ids"]) and np.isnan(engine).all() and trace["kept"]


def test_ratios_to_unrecorded_policy_have_no_decisions(tmp_path):
    make_run(tmp_path / "run", steps=1)
    run = find_runs([tmp_path])[0]
    run.config["objective"] = {"name": "icepop", "constraint": {"low": 0.2, "high": 0.28}}
    assert objective_of(run) is not None
    run.config["behavior"] = "engine"
    assert objective_of(run) is None


def test_gates_by_the_sign_of_a_critic_s_advantages_have_no_decisions(tmp_path):
    make_run(tmp_path / "run", steps=1)
    run = find_runs([tmp_path])[0]
    run.config["critic"] = {"gae_lambda": 1.0}
    assert objective_of(run) is not None  # pnpo rejects on both sides
    for name in ("ppo", "pnpo_one_sided", "positive_only"):
        run.config["objective"] = {"name": name}
        assert objective_of(run) is None and "the critic's" in reason_no_decisions(run)


def test_number_of_steps_follows_size_limit(tmp_path):
    make_run(tmp_path / "run", steps=14)
    runs = find_runs([tmp_path])
    steps = [
        life["steps"] for size in (0, 0.02, 4) for life in build_histories(runs, megabytes=size)
    ]
    assert steps[-1] == 14 and 1 <= steps[0] < 14 and len(steps) == 2
    assert spread_out([1, 2, 3, 4, 5, 6, 7], most=3) == [1, 4, 7]
    assert spread_out([1, 2], most=5) == [1, 2]
    assert spread_out([1, 2, 3], most=1) == [3]


def test_multi_token_character_is_at_its_last_token(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    bytes_of = {"Ã": 0, "©": 1, "x": 2}  # é in byte-level spelling
    tokenizer = Tokenizer(models.BPE(bytes_of, [], unk_token="x"))
    tokenizer.decoder = decoders.ByteLevel()
    make_run(tmp_path / "run", steps=1)
    tokenizer.save(str(tmp_path / "run" / "model" / "tokenizer.json"))
    pieces = Pieces(find_runs([tmp_path])[0])
    assert pieces.of([2, 0, 1, 2]) == ["x", "", "é", "x"]
    (tmp_path / "run" / "model" / "tokenizer.json").unlink()
    assert Pieces(find_runs([tmp_path])[0]).of([2]) is None
