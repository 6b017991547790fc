"""The page of the study of distillation under reuse against its stored rows."""

from research.tools.distill_reuse import EPOCHS, ROOT, STUDENTS, WEIGHTINGS, read_rows

PAGE = ROOT / "research" / "docs" / "distillation-study.md"


def test_rows_are_runs_of_the_plan_in_its_order():
    found = [(int(r["student"]), int(r["epochs"]), r["weighting"]) for r in read_rows()]
    planned = [(s, n, w) for s in STUDENTS for n in EPOCHS for w in WEIGHTINGS]
    assert found == [cell for cell in planned if cell in found]


def test_page_counts_the_rows():
    assert f"{len(read_rows())} of 120 runs" in PAGE.read_text(encoding="utf-8")
