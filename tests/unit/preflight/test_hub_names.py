"""Tests of the resolution of Hugging Face hub names from the cache to a fixed commit."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.apps.planning.models import (
    MODELS,
    find_shape,
    with_built_in_model,
    write_config_json,
)
from megatron_rl.config import ConfigError, dump_config, load_config, parse_config
from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.rows import parse_row, read_rows
from megatron_rl.preflight.hub_names import resolve_hub_names
from megatron_rl.preflight.settings import check_settings

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Create a huggingface_hub cache with a model and a data set, without network."""
    from huggingface_hub import constants

    for repository, file in (("models--me--tiny", "config.json"), ("datasets--me--sums", "x")):
        for commit in (OLD, NEW):
            (tmp_path / repository / "snapshots" / commit).mkdir(parents=True)
            (tmp_path / repository / "snapshots" / commit / file).write_text(commit)
        (tmp_path / repository / "refs").mkdir()
        (tmp_path / repository / "refs" / "main").write_text(OLD)
        (tmp_path / repository / "refs" / "v2").write_text(NEW)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def build_config(**sections):
    return parse_config({"model": {"path": "me/tiny"}, "data": {"train": "t.jsonl"}} | sections)


@pytest.mark.parametrize(("name", "commit"), [("me/tiny", OLD), ("me/tiny@v2", NEW)])
def test_resolve_hub_names_returns_cached_model_folder(cache, name, commit):
    config, overrides, _ = resolve_hub_names(build_config(model={"path": name}))
    folder = str(cache / "models--me--tiny" / "snapshots" / commit)
    assert config.model.path == folder
    assert overrides == [f'model.path="{folder}"']


def test_resolve_hub_names_adds_commit_to_data_sets(cache, tmp_path):
    columns = {"prompt": "q", "answer": "a"}
    config = build_config(
        data={"mix": {"a.b": {"path": "hf:me/sums@v2/hard:test", "columns": columns}}},
        eval={"sets": {"x": "hf:me/sums", "y": {"path": "hf:me/sums:test", "columns": columns}}},
        rollout={"prompts_per_step": 8}, trainer={"minibatches": 1},
    )  # fmt: skip
    resolved, overrides, _ = resolve_hub_names(config)
    assert resolved.data.mix["a.b"].path == f"hf:me/sums@{NEW}/hard:test"
    assert resolved.eval.sets["x"].path == f"hf:me/sums@{OLD}"
    assert resolved.eval.sets["y"].path == f"hf:me/sums@{OLD}:test"
    # The overrides give the ranks the same config.
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file, overrides) == resolved
    again, repeated, _ = resolve_hub_names(resolved)
    assert again == resolved and repeated == overrides[:-1]  # all but model.path


def test_resolve_hub_names_of_resumed_run_keeps_commits(cache, tmp_path):
    run = {"dir": str(tmp_path / "runs"), "name": "one", "resume": "auto"}
    config = build_config(run=run, data={"train": "hf:me/sums:test"})
    first, *_ = resolve_hub_names(config)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(first))
    for repository in ("models--me--tiny", "datasets--me--sums"):  # a newer commit is downloaded
        (cache / repository / "refs" / "main").write_text(NEW)
    assert resolve_hub_names(config)[0] == first
    other = resolve_hub_names(build_config())[0]
    assert other.model.path.endswith(NEW)
    another_split = build_config(run=run, data={"train": "hf:me/sums"})
    assert resolve_hub_names(another_split)[0].data.train == f"hf:me/sums@{NEW}"


def test_resolve_hub_names_missing_name_returns_download_command(cache):
    config = build_config(
        model={"path": "me/other", "reference": "me/tiny@v9"},
        objective={"kl": {"coefficient": 0.1}},
        data={"train": "hf:me/none/easy:test"},
    )
    same, overrides, problems = resolve_hub_names(config)
    assert (same, overrides) == (config, [])
    assert problems[0].startswith("model.path: me/other is neither in the Hugging Face cache nor")
    assert problems[0].endswith("where there is a network, run: hf download me/other")
    assert problems[1].endswith("run: hf download me/tiny --revision v9")
    assert problems[2].endswith("run: hf download me/none --repo-type dataset")
    _, _, (problem,) = resolve_hub_names(build_config(data={"train": "hf:none"}))
    assert "named hf:OWNER/NAME, or in full hf:OWNER/NAME@REVISION" in problem


def test_check_settings_reports_missing_model_with_other_problems(cache):
    with pytest.raises(ConfigError) as error:
        check_settings(build_config(model={"path": "me/other"}), world_size=1)
    output = str(error.value)
    folder = f"{Path.cwd()}/me/other"
    assert f"model.path: {folder} is not a folder; as a name on the Hugging Face hub: me" in output
    assert f"data.train: {Path.cwd()}/t.jsonl does not exist" in output
    assert "hf download me/other" in output


def test_read_rows_of_cached_data_set_needs_no_network(cache, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    folder = cache / "datasets--me--sums" / "snapshots" / OLD
    (folder / "x").unlink()
    (folder / "data").mkdir()
    for split, answer in (("train", "2"), ("test", "4")):
        table = pa.Table.from_pylist([{"question": "q", "answer": answer}])
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    columns = ColumnsSection(prompt="question", answer="answer")
    for name, truth in (("hf:me/sums", "2"), ("hf:me/sums:test", "4")):
        config, *_ = resolve_hub_names(build_config(data={"train": name}))
        ((number, plain),) = read_rows(type(tmp_path)(config.data.train), columns)
        row = parse_row(plain, columns, path=type(tmp_path)(config.data.train), number=number)
        assert (row.ground_truth, row.data_source) == (truth, "sums")
        assert json.dumps(plain)


def test_other_commands_use_cached_models(cache):
    folder = cache / "models--me--tiny" / "snapshots" / NEW
    write_config_json(MODELS["Qwen2.5-0.5B"], folder)
    config = with_built_in_model(build_config(model={"path": "me/tiny@v2"}), cache)
    assert config.model.path == str(folder)
    assert find_shape("me/tiny@v2").num_layers == 24
