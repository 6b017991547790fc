"""The page of the study of distillation under reuse against its stored rows."""

from research.tools.distill_reuse import (
    EPOCHS,
    REPEATED,
    ROOT,
    STUDENTS,
    WEIGHTINGS,
    of_whole_students,
    read_rows,
    tables,
)

PAGE = ROOT / "research" / "docs" / "distillation-study.md"


def test_rows_are_runs_of_the_plan_in_its_order():
    found = [
        (int(row["student"]), int(row["epochs"]), row["weighting"], int(row["repeat"]))
        for row in read_rows()
    ]
    planned = [(s, n, w, 0) for s in STUDENTS for n in EPOCHS for w in WEIGHTINGS]
    planned += [(s, n, w, 1) for s in STUDENTS for n in REPEATED for w in WEIGHTINGS]
    assert found == planned[: len(found)]


def test_page_has_the_tables_of_the_rows():
    page, rows = PAGE.read_text(encoding="utf-8"), read_rows()
    repeats = sum(row["repeat"] == "1" for row in rows)
    assert f"All {len(rows) - repeats} of 120 runs and {repeats} of the 80 repeats" in page
    assert tables(of_whole_students(rows)) in page
