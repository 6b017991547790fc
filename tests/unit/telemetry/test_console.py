"""Plain lines, heartbeats and silence."""

from megatron_rl.telemetry import console as console_module
from megatron_rl.telemetry.console import Console


def test_lines_without_terminal_are_plain(tmp_path, capsys):
    console = Console(is_main_rank=True, log_file=tmp_path / "log.txt")
    console.echo("step 1  [reward] 0.5")
    assert capsys.readouterr().out == "step 1  [reward] 0.5\n"
    assert (tmp_path / "log.txt").read_text().endswith(" step 1  [reward] 0.5\n")


def test_long_phase_prints_once_a_minute(capsys, monkeypatch):
    now = iter([0.0, 10.0, 61.0, 61.0, 100.0, 122.0, 122.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(now))
    with Console(is_main_rank=True).progress("rollout") as advance:
        for done in (1, 2, 3, 4):  # at 10, 61, 100 and 122 seconds
            advance(done, 4)
    assert capsys.readouterr().out == "  rollout: 2/4\n  rollout: 4/4\n"


def test_only_main_rank_prints(tmp_path, capsys):
    console = Console(is_main_rank=False, log_file=tmp_path / "log.txt")
    console.echo("hello")
    with console.progress("rollout") as advance:
        advance(1, 1)
    assert capsys.readouterr().out == "" and not (tmp_path / "log.txt").exists()
