"""The page of 1,024 ranks has the numbers of today."""

from pathlib import Path

from research.tools.scale_rows import data, export, hot_path, planning, reading

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_counts_of_a_push_are_those_on_the_page(monkeypatch):
    """Rounds, messages and copies of 72B at 1,024 ranks, which is planned in 0.1 s."""
    case = next(each for each in planning._cases() if each.model == "72B")
    monkeypatch.setattr(planning, "_cases", lambda: [case])
    lines = PAGE.read_text().splitlines()
    counted = [row for row in planning.rows() if row.how == "counted"]
    assert len(counted) == 3 and all(row.to_line() in lines for row in counted)


def test_bytes_of_1024_ranks_are_those_on_the_page(monkeypatch):
    """Responses, and reading and export of 72B: what takes longer is computed by the command."""
    for module in (reading, export):
        monkeypatch.setattr(
            module, "LAYOUTS", [each for each in module.LAYOUTS if each[0] == "72B"]
        )
    counted = [*data.response_rows(), *reading.rows(), *export.rows()]
    assert len(counted) == 24 and {row.how for row in counted} == {"counted"}
    lines = PAGE.read_text().splitlines()
    for row in counted:
        assert row.to_line() in lines


def test_counts_of_a_micro_batch_are_those_on_the_page():
    """Scans, rotation, messages and the host's reads; four micro-batches have three reads."""
    lines = PAGE.read_text().splitlines()
    missing = [row.to_line() for row in hot_path.rows() if row.to_line() not in lines]
    assert not missing
