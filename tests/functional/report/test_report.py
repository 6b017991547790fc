"""The report in a real browser: it loads without a word, its filters and sliders work."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from megatron_rl.report.build import collect, write_report
from megatron_rl.report.page import render_page
from megatron_rl.report.runs import find_runs, group_runs
from megatron_rl.report.series import first_passage
from tests.functional.debian import missing
from tests.functional.report.browser import PACKAGES, PROGRAMS, Browser
from tests.functional.tiny_runs import ROOT
from tests.made_runs import EPOCHS, GROUP, HOSTILE, make_run

PARTS = ("scores", "curves", "time", "ratios", "gate", "seconds", "life", "settings")
SLIDE = """
const [id, value] = arguments, input = document.getElementById(id);
input.value = value;
input.dispatchEvent(new Event("input"));
return input.parentElement.querySelector("output").textContent;
"""
TOKENS = """
return [...document.querySelectorAll(".tokens .token")]
    .map((one) => [one.textContent, one.className, one.style.background]);
"""
ROWS = """
const rows = "#scores tbody tr, #time tbody tr, #seconds .stack, #gate .heat";
return document.querySelectorAll(rows).length;
"""
TOOLTIP = """
const token = document.querySelectorAll(".tokens .token")[arguments[0]];
token.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
return [...document.querySelectorAll(".token-tip tbody tr")]
    .map((row) => [...row.cells].map((cell) => cell.textContent));
"""
# Whether each canvas has a pixel with a color.
PAINTED = """
return [...document.querySelectorAll("canvas")].filter((one) => one.offsetHeight).map((one) => {
    const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
    for (let i = 0; i < data.length; i += 4) {
        const [red, green, blue, alpha] = data.slice(i, i + 4);
        if (alpha && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) return true;
    }
    return false;
});
"""
BATCHES = """
return [...document.querySelectorAll("#time tbody tr")]
    .map((row) => [row.cells[0].textContent, row.cells[2].querySelector("span").firstChild.data]);
"""
CHOOSE = """
const buttons = [...document.querySelectorAll(`${arguments[0]} .choice button`)];
buttons.find((one) => one.textContent === arguments[1]).click();
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report by the command, on two objectives by two seeds."""
    study = tmp_path_factory.mktemp("study")
    for name in ("pnpo", "gspo"):
        for seed in (1, 2):
            make_run(study / f"{name}-{seed}", objective=name, seed=seed, steps=12, sets=("a", "b"))
    command = [sys.executable, "-m", "megatron_rl.cli", "report", str(study), "--bundle"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {f"{study}/report.html", f"{study}/report.zip"} <= set(printed.splitlines())
    return study


@pytest.fixture(scope="module")
def browser():
    if why := missing(PROGRAMS, packages=PACKAGES):
        pytest.skip(why)
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(browser, folder):
    """The report, freshly loaded; in the end nothing may have gone wrong in it."""
    browser.open(folder / "report.html")
    yield browser
    assert browser.said() == []
    assert browser.run("return window.hostile ?? null") is None
    assert browser.run('return performance.getEntriesByType("resource").length') == 0


def text_of(page, selector):
    return page.run("return document.querySelector(arguments[0]).textContent", selector)


def test_every_part_is_drawn(page):
    heights = 'return [...document.querySelectorAll("section")].map((s) => [s.id, s.offsetHeight])'
    shown = dict(page.run(heights))
    assert tuple(shown) == PARTS
    assert min(shown.values()) > 80
    painted = page.run(PAINTED)
    assert len(painted) > 20 and all(painted)
    widest = "return Math.max(...[...document.body.children].map((one) => one.scrollWidth))"
    assert page.run(widest) <= page.run("return innerWidth")


def test_a_filter_hides_a_setting_everywhere(page):
    assert page.run(ROWS) == 8
    page.run('document.querySelector(".chip").click()')
    assert page.run(ROWS) == 4
    assert "gspo" not in text_of(page, "#scores tbody")
    page.run('document.querySelector(".chip").click()')
    assert page.run(ROWS) == 8


def test_the_axis_and_the_threshold_change_what_is_shown(page, folder):
    groups = group_runs(find_runs([folder]))
    label = 'return document.querySelector("#curves .chart").uplot.axes[0].label'
    assert page.run(label) == "rollout batches"
    page.run(CHOOSE, "nav", "hours")
    assert page.run(label) == "hours"
    for threshold in (0.45, 0.55):
        assert page.run(SLIDE, "threshold", threshold) == str(threshold)
        shown = page.run(BATCHES)
        assert [name for name, _ in shown] == [group.label for group in groups]
        for group, (_, batches) in zip(groups, shown, strict=True):
            passages = [first_passage(run, threshold) for run in group.runs]
            mean = sum(passage["batches"] for passage in passages) / len(passages)
            assert float(batches) == pytest.approx(mean)


def test_epochs_and_steps_of_the_gate_can_be_chosen(page):
    seen = {text_of(page, "#gate .heats")}
    for step in (1, 12):
        assert page.run(SLIDE, "gate-step", step) == str(step)
        seen.add(text_of(page, "#gate .heats"))
    page.run(CHOOSE, "#gate", "std of log w")
    seen.add(text_of(page, "#gate .heats"))
    assert len(seen) == 4
    page.run(SLIDE, "gate-epoch", 2)
    assert "in epoch 2" in text_of(page, "#gate figcaption")


def test_the_epochs_of_a_response_are_those_of_the_files(page, folder):
    """Gate and numbers of a token against the parquet files, in float64 loops."""
    run, step, sample = page.run(
        "const [, name, step, , sample] = document.querySelector('.strip.open a')"
        ".getAttribute('href').split('/').map(decodeURIComponent);"
        "return [name, Number(step), Number(sample)]"
    )
    name = f"step_{step:06d}.parquet"
    trace = pq.read_table(folder / run / "traces" / name).to_pylist()[sample]
    rollout = pq.read_table(folder / run / "rollouts" / name).to_pylist()[trace["rollout"]]
    assert rollout["sample_index"] == sample
    seen = []
    for epoch in range(1, EPOCHS + 1):
        assert page.run(SLIDE, "life-epoch", epoch) == f"{epoch} of {EPOCHS}"
        seen.append(page.run(TOKENS))
        assert len(seen[-1]) == len(rollout["token_ids"])
    assert all(token[2] == "rgb(255, 255, 255)" for token in seen[0])  # nothing has moved yet
    assert seen[1] != seen[2] != seen[3]
    before = rollout["behavior_logprobs"]
    for t in (0, 7, len(before) - 1):
        for epoch, row in enumerate(page.run(TOOLTIP, t)):
            now = trace["policy_logprobs"][epoch]
            local = [a - b for a, b in zip(now, before, strict=True)]
            total = sum(local[: t + 1])
            want = [epoch + 1, now[t], local[t], total, total / (t + 1)]
            numbers = [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in row[:5]]
            assert numbers == pytest.approx(want, rel=6e-3, abs=1e-9)
            assert row[-1] == ("rejected" if "rejected" in seen[epoch][t][1] else "kept")


def test_a_link_opens_at_one_response(page, folder):
    hrefs = 'return [...document.querySelectorAll(".strip a")].map((one) => one.href)'
    links = page.run(hrefs)
    assert len(links) == GROUP
    page.open(folder / "report.html", "#" + links[2].partition("#")[2])
    assert text_of(page, "#opened").startswith("3 of 4")
    assert page.run("return scrollY") > 1000  # the page opens there
    page.run('document.querySelectorAll(".strip button")[1].click()')
    assert text_of(page, "#opened").startswith("2 of 4")
    assert page.run('return document.querySelectorAll(".worst tbody tr").length') == 20


def test_the_same_prompt_of_another_run_is_one_click_away(page):
    """Runs trace the same prompts where they can; an index may mean another one elsewhere."""
    opened = text_of(page, "#opened")
    assert page.run('return document.querySelectorAll(".elsewhere a").length') == 1
    other = text_of(page, ".elsewhere a")
    page.run('document.querySelector(".elsewhere a").click()')
    run = 'return document.querySelector(".life select").selectedOptions[0].textContent'
    page.until(run, other)
    assert text_of(page, "#opened").split(",")[:2] == opened.split(",")[:2]


def test_hostile_text_is_shown_as_it_is(page):
    assert HOSTILE[0] in text_of(page, ".prompt")
    shown = text_of(page, "#life")
    assert "\u202e" not in shown and "202e" in shown  # nothing turns the direction of a line
    assert page.run('return document.querySelectorAll("script").length') == 2
    assert page.run('return document.querySelectorAll("img, iframe, object").length') == 0


def test_a_page_without_traces_says_so(browser, tmp_path):
    make_run(tmp_path / "plain", traced=0, steps=3, sets=())
    write_report([tmp_path / "plain"])
    page = tmp_path / "plain" / "report.html"
    browser.open(page)
    assert browser.said() == []
    assert "traced_responses" in text_of(browser, "#life")
    assert page.stat().st_size < 200_000


def test_many_settings_are_chosen_by_what_names_them(browser, tmp_path):
    """12 settings, of which the page shows 4 first; what is shown has a color of its own."""
    for rate in (0.001, 0.002, 0.01):
        for name in ("pnpo", "gspo", "grpo", "dapo"):
            make_run(
                tmp_path / f"{rate}-{name}", objective=name, traced=0, steps=2,
                optimizer={"learning_rate": rate},
            )  # fmt: skip
    data = collect(group_runs(find_runs([tmp_path])), threshold=None, megabytes=0)
    (tmp_path / "report.html").write_text(render_page(data), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    lines = (
        "return [...document.querySelectorAll('#scores tbody th')].map((one) => one.textContent)"
    )
    assert browser.run(lines) == ["dapo", "grpo", "gspo", "pnpo"]
    colors = "return [...document.querySelectorAll('nav .chip i')].map((i) => i.style.background)"
    assert len(set(browser.run(colors))) == 4
    click = """
    const [facet, value, kind] = arguments, chips = document.querySelectorAll(".facet")[facet];
    [...chips.querySelectorAll("button")].find((one) => one.textContent === value)
        .dispatchEvent(new MouseEvent(kind));
    """
    browser.run(click, 0, "gspo", "dblclick")
    browser.run(click, 1, "all", "click")
    assert browser.run(lines) == ["lr 0.001", "lr 0.002", "lr 0.01"]
    browser.run(click, 1, "0.002", "dblclick")
    assert browser.run(lines) == ["gspo"]
    browser.run(click, 1, "0.002", "click")  # the last one stays
    assert browser.run(lines) == ["gspo"]
    browser.run(click, 0, "pnpo", "click")
    assert browser.run(lines) == ["gspo", "pnpo"]
    assert browser.said() == []


def test_a_run_that_has_hardly_begun_has_a_page(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/a/avg@1": 0.5}\n')
    write_report([tmp_path])
    browser.open(tmp_path / "report.html")
    assert browser.said() == []
    assert "50.0" in text_of(browser, "#scores")
    assert "No rollout batch" in text_of(browser, "#time")
    assert not any(word in text_of(browser, "main") for word in ("NaN", "Infinity", "undefined"))
