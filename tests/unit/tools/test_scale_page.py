"""The page of 1,024 ranks has the planner's numbers of today."""

from pathlib import Path

import pytest

from tools.benchmarks.scale_rows import layouts

PAGE = Path(__file__).parents[3] / "docs" / "measurements" / "scale.md"


@pytest.mark.parametrize(("devices", "pipeline", "expert"), [(256, 8, 64), (1024, 8, 64)])
def test_rows_of_layouts_are_those_on_the_page(devices, pipeline, expert):
    lines = PAGE.read_text().splitlines()
    for row in layouts.rows_of(devices, pipeline=pipeline, expert=expert):
        assert row.to_line() in lines
