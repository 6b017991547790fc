"""The self-contained page, with hostile text and many runs."""

import base64
import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.apps.report.build import collect
from megatron_rl.apps.report.page import pack, render_page
from megatron_rl.apps.report.pictures import draw_pictures
from megatron_rl.apps.report.runs import find_runs, group_runs
from tests.made_runs import HOSTILE, make_run


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_text_cannot_inject_markup():
    data = {"title": HOSTILE[0], "texts": list(HOSTILE)}
    text = pack(data)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert unpacked(text) == data
    page = render_page(data)
    assert page.count("<script") == page.count("</script>") == 2  # the data, the code
    assert "<title>&lt;/script&gt;" in page


def test_page_policy_allows_no_network_and_no_other_script():
    page = render_page({"title": "t"})
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy and "http" not in policy
    code = page.replace("https://github.com/leeoniya/uPlot", "")  # its license's comment
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\(", code)


def test_non_finite_numbers_become_null():
    numbers = {"a": [float("nan"), float("inf"), 1.23456789, 0.0]}
    assert unpacked(pack(numbers)) == {"a": [None, None, 1.2346, 0.0]}


def test_page_of_many_runs_is_below_400_kilobytes(tmp_path):
    for objective in ("pnpo", "gspo", "grpo", "dapo", "cispo"):
        for seed in range(2):
            make_run(
                tmp_path / f"{objective}-{seed}",
                objective=objective,
                seed=seed,
                steps=150,
                traced=0,
            )
    groups = group_runs(find_runs([tmp_path]))
    assert len(groups) == 5
    page = render_page(collect(groups, threshold=None, megabytes=4))
    assert len(page.encode()) < 400_000


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Create a study of 12 settings and 13 runs; the last started after its table was written."""
    study, rows = tmp_path_factory.mktemp("grid"), []
    rates = {f"{rate}": rate for rate in (1e-3, 2e-3, 1e-2)}
    points = [(r, o, 1) for r in rates for o in ("pnpo", "gspo", "grpo", "dapo")]
    for rate, objective, seed in [*points, ("0.01", "dapo", 2)]:
        name = f"{rate}-{objective}-seed{seed}"
        make_run(
            study / "runs" / name, objective=objective, seed=seed, steps=2,
            traced=2 if rate == "0.01" else 0, optimizer={"learning_rate": rates[rate]},
        )  # fmt: skip
        rows.append({"run": name, "axis/rate": rate, "axis/objective": objective, "seed": seed})
    pq.write_table(pa.Table.from_pylist(rows[:-1]), study / "results.parquet")
    return study


def test_initially_shown_groups_are_readable_subset(grid, tmp_path):
    groups = group_runs(find_runs([grid]))
    names = [f"{name} · rate 0.01" for name in ("dapo", "grpo", "gspo", "pnpo")]
    assert [group.label for group in groups][-4:] == names
    assert [run.name for run in groups[-4].runs] == ["0.01-dapo-seed1", "0.01-dapo-seed2"]
    data = collect(groups, threshold=None, megabytes=4)
    assert data["naming"] == ["objective", "rate"]
    assert data["first"] == [8, 9, 10, 11]  # where most runs are
    rate = data["settings"]["optimizer.learning_rate"]
    assert rate["values"] == ["0.001", "0.002", "0.01"]
    assert rate["of"] == 4 * [0] + 4 * [1] + 5 * [2]
    assert data["settings"]["trainer.epochs"] == {"values": ["4"], "of": []}
    drawn = draw_pictures(data, tmp_path)  # a warning of matplotlib would be an error
    assert len(drawn) == 6


def test_traces_fit_in_size_limit(grid):
    groups = group_runs(find_runs([grid]))
    sizes = {}
    for megabytes in (0.0, 0.001, 0.03, 4.0):
        data = collect(groups, threshold=None, megabytes=megabytes)
        assert data["traced"] == 5
        sizes[megabytes] = [data["runs"][life["run"]]["name"] for life in data["life"]]
    assert sizes[0.0] == [] and len(sizes[0.001]) == 1 and len(sizes[4.0]) == 5
    assert 1 < len(sizes[0.03]) < 5
    assert "0.01-dapo-seed2" not in sizes[0.03]  # one run of each setting comes first
