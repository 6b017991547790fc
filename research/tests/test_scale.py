"""The frame of the table of what many ranks cost: sections are whole, and replaced in place."""

import pytest

from research.tools.scale import NAMES, PAGE, module_named, replace_section
from research.tools.scale_rows import HEAD, Row


def test_row_is_line_of_table():
    row = Row("sockets", "tp8 pp4", 1024, 2836, 0.12345, "a rank", "counted")
    line = row.to_line()
    assert line == "| sockets | tp8 pp4 | 1,024 | 2,836 | 0.123 | a rank | counted |"
    assert line.count("|") == HEAD.splitlines()[0].count("|")


def test_section_is_replaced_where_it_is():
    page = replace_section("# Page\n", "one", "first")
    page = replace_section(page, "two", "second")
    page = replace_section(page, "one", r"third \1")
    assert page.index(r"third \1") < page.index("second") and "first" not in page
    assert page.startswith("# Page\n\n<!-- rows: one -->\n")


@pytest.mark.parametrize("name", NAMES)
def test_modules_have_title_text_and_section(name):
    module = module_named(name)
    assert module.TITLE and module.TEXT and callable(module.rows)
    assert f"<!-- rows: {name} -->\n## {module.TITLE}\n" in PAGE.read_text()
