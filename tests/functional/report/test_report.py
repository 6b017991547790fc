"""The report in a real browser: it loads without console output; filters and sliders work."""

import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from megatron_rl.apps.report.build import collect, render_page, write_report
from megatron_rl.apps.report.responses import RESPONSES
from megatron_rl.apps.report.runs import find_runs, first_passage, group_runs
from megatron_rl.runs.rollouts import read_rollouts
from tests import made_runs
from tests.functional.debian import missing
from tests.functional.report.browser import PACKAGES, PROGRAMS, Browser
from tests.functional.tiny_runs import ROOT
from tests.made_runs import EPOCHS, GROUP, HOSTILE, make_run

pytestmark = pytest.mark.slow  # a browser is installed

# Elements outside the window, and contents wider than their visible part; hidden labels of the bars
# of seconds are in the table below them.
CUT = """
const wide = document.documentElement.clientWidth, cut = [];
for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    if (!box.width || one.closest(".part, .tip, .u-wrap")) continue;
    const hides = getComputedStyle(one).overflowX !== "visible";
    const isOutside = box.left < -0.5 || box.right > wide + 0.5;
    if (isOutside || (hides && one.scrollWidth > one.clientWidth + 1))
        cut.push(`${one.tagName} ${one.className} ${box.right} ${one.scrollWidth}`);
}
return cut;
"""
MOVED = """
return [...document.querySelectorAll(".worst tbody tr")].map((row) => row.cells[2].textContent);
"""
PARTS = ("scores", "curves", "time", "ratios", "gate", "seconds", "timeline", "life", "responses",
         "settings")  # fmt: skip
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
# Label of each row of the timeline, and its ends of steps.
LANES = """
return [...document.querySelectorAll("#timeline .stack")]
    .map((row) => [row.querySelector(".who").textContent, row.querySelectorAll("b").length]);
"""
BATCHES = """
return [...document.querySelectorAll("#time tbody tr")]
    .map((row) => [row.cells[0].textContent, row.cells[2].querySelector("span").firstChild.data]);
"""
CHOOSE = """
const buttons = [...document.querySelectorAll(`${arguments[0]} .choice button`)];
buttons.find((one) => one.textContent === arguments[1]).click();
"""

REACHED = """
return [...document.querySelectorAll("#time tbody tr")].map((row) => row.cells[1].textContent);
"""
ENDS = """
const slider = document.getElementById("threshold").parentElement;
const ends = [...slider.querySelectorAll("small")].map((one) => one.textContent);
return [...ends, slider.querySelector("output").textContent];
"""
# Counts labels inside their part, and hidden ones below it; no label may be cut.
LABELS = """
const places = [...document.querySelectorAll("#seconds .part span")].map((label) => {
    const own = label.getBoundingClientRect(), part = label.parentElement.getBoundingClientRect();
    if (own.top >= part.bottom - 1) return "below";
    return own.right <= part.right ? "inside" : "cut";
});
if (places.includes("cut")) throw new Error(places.join());
return ["inside", "below"].map((wanted) => places.filter((place) => place === wanted).length);
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a report with the command, for two objectives with two seeds each."""
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
    """Load the report; check after the test that it produced no errors and no requests."""
    browser.open(folder / "report.html")
    yield browser
    assert browser.output() == []
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


def test_nothing_is_cut_in_a_narrow_window(page, folder):
    try:
        for width in (390, 1360):
            page.resize(width, 900)
            page.open(folder / "report.html")
            page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert page.run(CUT) == [], width
            assert "a model" in text_of(page, ".about")
    finally:
        page.resize(1360, 1000)


def test_words_are_explained_by_keyboard_and_pointer(page):
    word = "document.querySelector('#gate .explanation .term')"
    assert page.run(f"return {word}.textContent") == "Accepted"
    assert page.run(f"{word}.focus(); return document.activeElement === {word}")
    page.run(f"{word}.click()")
    shown = page.run(
        "const note = document.getElementById('note'), box = note.getBoundingClientRect();"
        "const fits = box.left >= 0 && box.right <= innerWidth;"
        "return [note.matches(':popover-open'), note.textContent, fits]"
    )
    assert shown[0] and "non-zero advantage" in shown[1] and shown[2]
    # Arrow keys show the values of the tokens, one after the other.
    key = "dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    for position in (1, 2):
        page.run(f"document.querySelector('.tokens').{key}")
        assert f"position {position} of" in text_of(page, ".token-tip")


def test_filter_hides_setting_everywhere(page):
    assert page.run(ROWS) == 8
    page.run('document.querySelector(".chip").click()')
    assert page.run(ROWS) == 4
    assert "gspo" not in text_of(page, "#scores tbody")
    assert "12.5% truncated" in text_of(page, "#scores tbody")
    assert "1.0% not graded" in text_of(page, "#scores tbody")
    page.run('document.querySelector(".chip").click()')
    assert page.run(ROWS) == 8


def test_timeline_has_row_for_each_group_of_ranks(page):
    """The runs of gspo have engines on ranks of their own."""
    assert page.run(LANES) == [["gspo trainers", 2], ["gspo engines", 2], ["pnpo all ranks", 2]]
    label = page.run("return document.querySelector('.lane').ariaLabel")
    assert re.fullmatch(r"trainers: reward [\d.]+ s, .*train .*, waits [\d.]+ s", label)
    assert page.run(SLIDE, "timeline-step", 0) == "1"  # the first one has no step before it
    assert [edges for _, edges in page.run(LANES)] == [0, 0, 0]
    assert page.run("return document.querySelector('.lane').ariaLabel") != label
    table = "return document.querySelectorAll('#timeline tbody tr').length"
    bars = "return document.querySelectorAll('.lane i').length"
    assert page.run(table) == page.run(bars) > 15
    page.run('document.querySelector(".chip").click()')
    assert page.run(LANES) == [["pnpo all ranks", 0]]


def test_axis_and_threshold_change_figures(page, folder):
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


def test_gate_epochs_and_steps_are_selectable(page):
    texts = {text_of(page, "#gate .heats")}
    for step in (1, 12):
        assert page.run(SLIDE, "gate-step", step) == str(step)
        texts.add(text_of(page, "#gate .heats"))
    page.run(CHOOSE, "#gate", "std of log w")
    texts.add(text_of(page, "#gate .heats"))
    assert len(texts) == 4
    page.run(SLIDE, "gate-epoch", 2)
    assert "in epoch 2" in text_of(page, "#gate figcaption")


def test_response_values_match_files(page, folder):
    """Compare decisions and values of tokens with the parquet files, in float64 loops."""
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
    assert all(token[2] == "rgb(255, 255, 255)" for token in seen[0])  # no change yet
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


def test_link_opens_one_response(page, folder):
    hrefs = 'return [...document.querySelectorAll(".strip a")].map((one) => one.href)'
    links = page.run(hrefs)
    assert len(links) == GROUP
    page.open(folder / "report.html", "#" + links[2].partition("#")[2])
    assert text_of(page, "#opened").startswith("3 of 4")
    assert page.run("return scrollY") > 1000  # scrolled to the response
    page.run('document.querySelectorAll(".strip button")[1].click()')
    assert text_of(page, "#opened").startswith("2 of 4")
    assert page.run('return document.querySelectorAll(".worst tbody tr").length') == 20
    moved = [abs(float(cell.replace("\N{MINUS SIGN}", "-"))) for cell in page.run(MOVED)]
    assert moved == sorted(moved, reverse=True) and moved[0] > 0  # each token's own change


def test_link_opens_same_prompt_of_another_run(page):
    """Runs trace the same prompts if possible; links compare step, index and prompt."""
    opened = text_of(page, "#opened")
    assert page.run('return document.querySelectorAll(".elsewhere a").length') == 1
    other = text_of(page, ".elsewhere a")
    page.run('document.querySelector(".elsewhere a").click()')
    run = 'return document.querySelector(".life select").selectedOptions[0].textContent'
    page.until(run, other)
    assert text_of(page, "#opened").split(",")[:2] == opened.split(",")[:2]


def test_hostile_text_is_shown_as_text(page):
    assert HOSTILE[0] in text_of(page, ".prompt")
    shown = text_of(page, "#life")
    assert "\u202e" not in shown and "202e" in shown  # no change of text direction
    assert page.run('return document.querySelectorAll("script").length') == 2
    assert page.run('return document.querySelectorAll("img, iframe, object").length') == 0


def test_responses_are_browsed_by_run_step_and_order(page, folder):
    first = read_rollouts(folder / "gspo-1", 1)
    page.run("""
        const [run] = document.querySelectorAll("#responses select");
        run.value = "gspo-1";
        run.dispatchEvent(new Event("change"));
    """)
    assert page.run(SLIDE, "responses-step", 0) == "1"
    rewards = (
        'return [...document.querySelectorAll("#responses summary b")]'
        ".map((one) => Number(one.textContent))"
    )
    shown = page.run(rewards)
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == min(len(first), RESPONSES)
    assert max(shown) == pytest.approx(max(row["reward"] for row in first), rel=1e-2)
    page.run("""
        const buttons = [...document.querySelectorAll("#responses button")];
        buttons.find((one) => one.textContent === "lowest reward").click();
    """)
    assert page.run(rewards) == sorted(shown)
    text = text_of(page, "#responses details")
    assert "Prompt" in text and "Truth" in text


def test_page_without_traces_shows_message(browser, tmp_path):
    make_run(tmp_path / "plain", traced=0, steps=3, sets=())
    write_report([tmp_path / "plain"])
    page = tmp_path / "plain" / "report.html"
    browser.open(page)
    assert browser.output() == []
    assert "traced_responses" in text_of(browser, "#life")
    assert page.stat().st_size < 200_000


def test_many_settings_are_filtered_by_label_parts(browser, tmp_path):
    """12 settings, 4 of them shown initially, each with its own color."""
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
    browser.run(click, 1, "0.002", "click")  # the last one remains
    assert browser.run(lines) == ["gspo"]
    browser.run(click, 0, "pnpo", "click")
    assert browser.run(lines) == ["gspo", "pnpo"]
    assert browser.output() == []


def test_fraction_axis_has_minimum_range(page):
    """Accepted fractions differ by a few hundredths; the axis shows a range of at least 0.2."""
    low, high = page.run(
        "const { y } = document.querySelectorAll('#gate .chart')[1].uplot.scales;"
        "return [y.min, y.max]"
    )
    assert 0.2 <= high - low <= 0.5 and low > 0.4 and high < 1.1
    captions = "return [...document.querySelectorAll('#curves figcaption')]"
    titles = page.run(f"{captions}.map((one) => one.textContent)")
    assert "Entropy of the computed tokens (nats per token)" in titles


def test_partial_rewards_short_responses_and_narrow_phases(browser, tmp_path, monkeypatch):
    """A correct response has reward 1; all tokens are listed; labels that do not fit are hidden."""
    monkeypatch.setattr(made_runs, "LENGTH", 12)
    for name in ("pnpo", "gspo"):
        make_run(tmp_path / name, objective=name, steps=6, best=0.0145)
    write_report([tmp_path])
    browser.open(tmp_path / "report.html")
    strips = text_of(browser, ".strips")
    assert "0.0145" in strips and "\N{CHECK MARK}" not in strips
    tokens, rows, hidden = browser.run(
        "const worst = document.querySelector('.worst');"
        "return [document.querySelectorAll('.tokens .token').length,"
        "worst.querySelectorAll('tbody tr').length, worst.scrollHeight - worst.clientHeight]"
    )
    assert rows == tokens <= 12 and hidden == 0
    title = "return [...document.querySelectorAll('#life h3')].at(-1).textContent"
    assert (
        browser.run(title)
        == f"The {tokens} tokens that changed most, each by itself (|\u2113\u209c|)"
    )
    assert browser.run(REACHED) == ["1 of 1", "1 of 1"]  # at first
    low, high, shown = browser.run(ENDS)
    assert 0 < float(low) < float(shown) < float(high) < 0.0145
    assert browser.run(SLIDE, "threshold", float(high)) == high != shown
    assert "gspo are not drawn: they limit the mean over the whole response" in text_of(
        browser, "#gate"
    )
    fits, hidden_labels = browser.run(LABELS)
    assert fits > 3 and hidden_labels > 0
    assert browser.output() == []


def test_observations_and_new_histories_are_marked(browser, tmp_path):
    """Each observation stands before the token that follows it, marked if it replaces the rest."""
    make_run(tmp_path / "run", steps=1, traced=1, turns=3)
    write_report([tmp_path])
    browser.open(tmp_path / "report.html")
    marks = browser.run(
        "return [...document.querySelectorAll('.tokens .observed')].map((one) =>"
        " [one.classList.contains('restart'), one.textContent, one.title])"
    )
    words = "⟨202e⟩gnihton⟨2069⟩" * 3  # the page shows control characters
    assert [(mark, text.replace("\u21b5", "")) for mark, text, _ in marks] == [
        (False, words),
        (True, words),
    ]
    assert "in place of everything before" in marks[1][2]
    assert "in 3 turns and 2 histories" in text_of(browser, "#life")
    assert browser.output() == []


def test_page_of_run_with_one_evaluation(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/a/avg@1": 0.5}\n')
    write_report([tmp_path])
    browser.open(tmp_path / "report.html")
    assert browser.output() == []
    assert "50.0" in text_of(browser, "#scores")
    assert "No rollout batch" in text_of(browser, "#time")
    assert not any(word in text_of(browser, "main") for word in ("NaN", "Infinity", "undefined"))
