"""One file that needs nothing else, however hostile what it shows."""

import json
import re

from megatron_rl.report.build import collect
from megatron_rl.report.page import as_json, render_page
from megatron_rl.report.runs import find_runs, group_runs
from tests.made_runs import HOSTILE, make_run


def test_no_text_leaves_its_place():
    data = {"title": HOSTILE[0], "texts": list(HOSTILE)}
    text = as_json(data)
    assert not set("<>&") & set(text)
    assert json.loads(text) == data
    page = render_page(data)
    assert page.count("<script") == page.count("</script>") == 2  # the data, the code
    assert "<title>&lt;/script&gt;" in page


def test_a_page_asks_no_network_and_runs_no_other_script():
    page = render_page({"title": "t"})
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy and "http" not in policy
    code = page.replace("https://github.com/leeoniya/uPlot", "")  # its license's comment
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\(", code)


def test_numbers_that_are_none_become_null():
    assert (
        as_json({"a": [float("nan"), float("inf"), 1.23456789, 0.0]})
        == '{"a":[null,null,1.2346,0.0]}'
    )


def test_a_study_of_many_runs_stays_well_under_a_megabyte(tmp_path):
    for objective in ("pnpo", "gspo", "grpo", "dapo", "cispo"):
        for seed in range(4):
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
    assert len(page.encode()) < 900_000
