"""DAPO's recipe and offline data, on the real parts: one run, and its rollouts trained again."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from megatron_rl.runs.files import read_rows
from tests.functional.tiny_runs import ROOT, TASK, TRAIN, make_task, train

EXAMPLES = ROOT / "examples" / "pnpo"
MODEL = f"model.path={TASK}/model"
SMALL = ("rollout.prompts_per_step=8", "rollout.responses_per_prompt=4", "trainer.minibatches=2",
         "trainer.epochs=2", "trainer.steps=2", "trainer.checkpoint_every=2")  # fmt: skip
# What makes the same updates of the same rollouts.
RECIPE = ("objective={name: dapo}", "advantage={estimator: group_relative}", "shaping.signed=true",
          "shaping.overlong={kind: soft, buffer: 12, penalty: 1.0}")  # fmt: skip


@pytest.fixture(scope="module")
def dapo(tmp_path_factory):
    """The rows and the folder of a short run by examples/pnpo/dapo.yaml."""
    make_task()
    folder = tmp_path_factory.mktemp("ppo")
    rows = train(
        *SMALL, f"run.dir={folder}", "run.name=dapo",
        config=EXAMPLES / "dapo.yaml",
        places=(MODEL, f"data.train={TRAIN}", "eval.sets={}"),
    )  # fmt: skip
    return rows[1:], folder / "dapo"


def train_offline(folder, name, *overrides):
    rows = train(
        *SMALL, *RECIPE, f"run.dir={folder.parent}", f"run.name={name}",
        f"offline.rollouts={folder}", *overrides,
        config=EXAMPLES / "offline.yaml", places=(MODEL,),
    )  # fmt: skip
    return rows[1:], load_file(folder.parent / name / "model" / "model.safetensors")


def test_recipe_trains_expected_rollouts_at_expected_cost(dapo):
    rows, folder = dapo
    schedule = read_rows(folder / "schedule.jsonl")
    assert rows[0]["ratio/first_minibatch_max_deviation"] == 0
    for step, row in enumerate(rows, start=1):
        table = pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet")
        rewards = np.array(table["reward"].to_pylist()).reshape(8, 4)
        lacking = sum(len(set(group)) == 1 for group in rewards)
        assert lacking == row.get("dynamic/groups_lacking", 0)  # all slots may be filled already
        assert row.get("dynamic/rounds", 0) <= 3
        older = sum(lag > 0 for lag in schedule[step - 1]["lag"])
        assert older == (rows[step - 2].get("dynamic/groups_kept_for_later", 0) if step > 1 else 0)
        assert row.get("dynamic/groups_generated", 0) >= 8 - older
        lengths = np.array([len(tokens) for tokens in table["token_ids"].to_pylist()])
        overlong = np.clip((lengths - (56 - 12)) / 12, 0, 1)
        shaped = 2 * rewards.flatten() - 1 - overlong
        assert row["reward/shaped_mean"] == pytest.approx(shaped.mean())
        assert row["reward/mean"] == pytest.approx(rewards.mean())


def test_rollouts_of_run_reproduce_its_weights_bit_for_bit_without_engine(dapo):
    rows, folder = dapo
    again, weights = train_offline(folder, "again")
    for key in ("loss/policy", "grad/norm", "reward/mean", "gate/acceptance"):
        assert [row[key] for row in again] == [row[key] for row in rows]
    trained = load_file(folder / "model" / "model.safetensors")
    assert all(weights[name].equal(weight) for name, weight in trained.items())
    assert "rollout/tokens" not in again[0]


def test_named_model_reproduces_behavior_log_probs_of_its_rollouts(dapo):
    rows, folder = dapo
    settings = (f"offline.behavior={TASK}/model", "trainer.steps=1")
    (first,), _ = train_offline(folder, "named", *settings)
    assert first["grad/norm"] == rows[0]["grad/norm"]
    assert first["ratio/first_minibatch_max_deviation"] == 0
