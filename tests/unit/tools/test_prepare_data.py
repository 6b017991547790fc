"""Prompt files of published sets, from files as they are published."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.rows import check_prompt_file

ROOT = Path(__file__).parents[3]


def prepare(tmp_path, *sets):
    """The command, without a network."""
    return subprocess.run(
        [sys.executable, "tools/prepare_data.py", "--output", str(tmp_path / "data"), *sets],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )  # fmt: skip


def test_files_become_prompts_with_distinct_problems(tmp_path):
    rows = [{"problem": " What is 3 + 4? ", "answer": 7, "url": "x"}] * 2
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dapo = {
        "data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([dapo] * 3), tmp_path / "dapo.parquet")
    done = prepare(tmp_path, f"aime25={tmp_path}/test.jsonl", f"dapo={tmp_path}/dapo.parquet")
    assert done.returncode == 0, done.stderr
    (row,) = pq.read_table(tmp_path / "data" / "aime25.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "7" and row["data_source"] == "aime25"
    content = row["prompt"][0]["content"]
    assert content.startswith("What is 3 + 4?\n\n") and content.endswith("\\boxed{}.")
    (row,) = pq.read_table(tmp_path / "data" / "dapo-math-17k.parquet").to_pylist()
    assert row["prompt"][0]["content"] == "1+1" and row["data_source"] == "math_dapo"
    for file in (tmp_path / "data").iterdir():
        check_prompt_file(file, ColumnsSection())


def test_unavailable_data_names_how_to_get_it(tmp_path):
    done = prepare(tmp_path, f"amc23={tmp_path}/none.jsonl", "aime24")
    assert done.returncode == 1
    assert "none.jsonl does not exist" in done.stderr
    assert "hf download HuggingFaceH4/aime_2024 --repo-type dataset" in done.stderr
    assert "aime24=FILE" in done.stderr and "amc23=FILE" not in done.stderr
    assert "there are dapo, amc23" in prepare(tmp_path, "amc24").stderr
