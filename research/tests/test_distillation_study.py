"""The page of the study of distillation under reuse against its stored rows."""

from research.tools.distill_reuse import EPOCHS, ROOT, STUDENTS, WEIGHTINGS, read_rows, tables

PAGE = ROOT / "research" / "docs" / "distillation-study.md"


def test_rows_are_the_runs_of_the_plan():
    found = [(int(r["student"]), int(r["epochs"]), r["weighting"]) for r in read_rows()]
    wanted = [(s, n, w) for s in STUDENTS for n in EPOCHS for w in WEIGHTINGS]
    assert found == wanted


def test_page_has_the_tables_of_the_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert tables(read_rows()) in text
