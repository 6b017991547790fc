"""docs/gpu-claims.md lists every sentence that only a GPU can show, with evidence that exists."""

import re

import pytest

from tools import gpu_claims
from tools.gpu_check import __main__ as gpu_check

LEDGER = gpu_claims.read_ledger(gpu_claims.LEDGER.read_text())


def test_every_sentence_about_a_gpu_is_listed():
    assert gpu_claims.compare(gpu_claims.pages(gpu_claims.ROOT), LEDGER) == []


def test_every_row_of_the_ledger_is_read():
    page = gpu_claims.LEDGER.read_text().partition("## By sentence")[2]
    table = page.partition("|---")[2].splitlines()[1:]
    assert len(LEDGER) == sum(line.startswith("| ") for line in table)


@pytest.mark.parametrize("claim", LEDGER, ids=lambda one: f"{one.page}: {one.words}")
def test_evidence_of_each_state_exists(claim):
    if claim.state == "seen":
        assert re.match(r"One [A-Z]\w+, \d{4}-\d\d-\d\d", claim.evidence)
    elif claim.state == "CPU test":
        tests = re.findall(r"`(tests/[^`]+)`", claim.evidence)
        assert tests and all((gpu_claims.ROOT / test).exists() for test in tests)
    elif claim.state == "not shown":
        rows = re.findall(r"`(\w+)`", claim.evidence.split(";")[0])
        known = set(rows) <= {*gpu_check.NAMES}
        assert (rows and known) or claim.evidence.startswith(("no row: ", "every row"))
    else:
        assert claim.evidence


def test_capabilities_name_existing_tests_and_rows():
    page = gpu_claims.LEDGER.read_text().partition("## By sentence")[0]
    lists = re.findall(r"rows? (`\w+`(?:(?:, | and )`\w+`)*)", page)
    rows = {name for some in lists for name in re.findall(r"`(\w+)`", some)}
    assert rows
    assert rows <= {*gpu_check.NAMES}
    tests = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", page)
    known = {path.name for path in (gpu_claims.ROOT / "tests").rglob("test_*.py")}
    assert tests
    assert {*tests} <= known


def test_status_of_the_readme_is_made_from_the_ledger():
    readme = (gpu_claims.ROOT / "README.md").read_text()
    assert gpu_claims.BLOCK.search(readme)[0] == gpu_claims.status(LEDGER)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It runs on a GPU. It is blue.", 1),
        ("An H100 takes\n0.05 s for it.", 1),
        ("| a | tested | CUDA |\n| b | 3 GiB | NCCL |\n| c | d | e |", 2),
        ("- NCCL works\n- gloo works\n- CUDA is\n  faster", 2),
        ("```\nruns on a GPU\n```\n# It runs on a GPU", 0),
        ("See [On GPUs](gpus.md).", 0),
        ("Nothing waits for the device. NCCL finds InfiniBand. It leaves a device.", 2),
    ],
)
def test_rule_finds_claims(text, count):
    assert len(gpu_claims.claims_in({"a.md": text})) == count


def test_new_removed_and_repeated_sentences_are_reported():
    page = {"a.md": "It runs on a GPU. It ran on an H100. It ran on an H100."}
    listed = [gpu_claims.Claim("a.md", "It runs on a GPU."), gpu_claims.Claim("a.md", "Gone.")]
    assert gpu_claims.compare(page, listed) == [
        "missing: | a.md | It ran on an H100. | not shown |  |",
        "no such sentence: | a.md | Gone. | not shown |  |",
    ]
