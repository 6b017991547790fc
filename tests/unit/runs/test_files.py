"""A file under its name is whole, after a power cut too."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

from megatron_rl.runs import files
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runtime.interruption import Interruption
from megatron_rl.trainer.recorder import closing_lines
from tests.unit.trainer.scripted import run_loop


def spy_on_disk(monkeypatch):
    """The names of what is flushed and replaced, in order."""
    events, fsync, replace = [], os.fsync, os.replace

    def flushed(handle):
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def replaced(source, target):
        events.append(("replace", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    return events


def test_content_is_synced_before_rename(tmp_path, monkeypatch):
    events = spy_on_disk(monkeypatch)
    files.atomic_write_text(tmp_path / "config.yaml", "seed: 1\n")
    partial = ("flush", ".config.yaml.partial")
    assert events == [partial, ("replace", "config.yaml"), ("flush", tmp_path.name)]


def test_files_of_checkpoint_are_synced_before_manifest(tmp_path, monkeypatch):
    """A power cut would otherwise leave a checkpoint without the steps before it."""
    events = spy_on_disk(monkeypatch)
    run_loop(tmp_path, keep=Interruption(), trainer={"checkpoint_every": 2})
    before = [name for kind, name in events[: events.index(("flush", "trainer.json"))]
              if kind == "flush"]  # fmt: skip
    assert {"metrics.jsonl", "schedule.jsonl", "timeline.jsonl"} <= set(before)
    partials = (".config.yaml.partial", ".metrics.jsonl.partial", ".step_000001.parquet.partial")
    assert set(partials) <= set(before)


def test_row_takes_the_place_of_one_that_a_kill_has_cut(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text in ("", '{"a": 1}\n', '{"a": 1}\n{"a": "' + "x" * 200_000):
        file.write_text(text)
        files.append_row(file, {"b": 2})
        assert files.read_rows(file) == [*([{"a": 1}] if text else []), {"b": 2}]


def test_ends_of_files_are_read_and_cut_without_the_rest(tmp_path, monkeypatch):
    """Show that the first rows, damaged here, are not parsed: 100,000 steps have gigabytes."""
    monkeypatch.setattr(files, "_BLOCK", 7)
    rows = [{"step": step, "a": step / 2, "b/a": 9, "eval/x/avg@1": step} for step in range(5)]
    text = "{damaged}\n" + "".join(files.json.dumps(row) + "\n" for row in rows)
    file = tmp_path / "metrics.jsonl"
    file.write_text(text + '{"step": 5, "a"')
    assert files.last_step(tmp_path) == 4
    assert [*files.iterate_metric(tmp_path, "a")] == [0.0, 0.5, 1.0, 1.5, 2.0]
    later = list(files.iterate_rows_after(file, 2))
    assert later == rows[3:]
    assert (
        [*files.iterate_rows_after(file, 4)] == [*files.iterate_rows_after(tmp_path / "x", 0)] == []
    )
    assert files.evaluation_scores(tmp_path, metric="eval/x/avg@1") == {n: n for n in range(5)}
    files.drop_rows(file, until=lambda row: row["step"] <= 2)
    assert file.read_text() == text[: text.index(files.json.dumps(rows[3]))]
    file.write_text('{"step": 1}\n')
    files.drop_rows(file, until=lambda row: False)
    assert file.read_text() == "" and files.last_step(tmp_path) is None
    file.write_text("".join(files.json.dumps(row) + "\n" for row in rows))
    assert [*files.iterate_rows_after(file, -1)] == rows


def test_long_metrics_are_thinned_and_summed_without_a_list_of_their_rows(tmp_path):
    """Show by the greatest memory in Python: 4 MB of metrics, of 2,000 steps."""
    filling = "x" * 1900
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(2000):
            row = {"step": step, "time/step": 0.5, "a": step, "filling": filling}
            row |= {"eval/x/avg@1": step / 2000} if step % 100 == 50 else {}
            file.write(files.json.dumps(row) + "\n")
    tracemalloc.start()
    rows, every = files.thin_metrics(tmp_path, most=10, wanted=lambda key: key != "filling")
    lines = closing_lines(RunDirectory(tmp_path), files.iterate_rows(tmp_path / "metrics.jsonl"))
    late = sum(1 for _ in files.iterate_rows_after(tmp_path / "metrics.jsonl", 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert every == 200 and late == 999
    assert [row["step"] for row in rows if row["step"] % 100 != 50] == [*range(0, 2000, 200)]
    assert [row["step"] for row in rows if "eval/x/avg@1" in row] == [*range(50, 2000, 100)]
    assert lines[1].endswith("97.5% after (+95.0 points; best 97.5% at step 1950)")
    assert lines[2].startswith("  seconds: 1000 ")
    assert peak < 1 << 19


HOLD = """
import sys
from pathlib import Path
from megatron_rl.runs.files import try_lock
file = Path(sys.argv[1]).open("w")
assert try_lock(file)
file.write("process 1 on a\\n")
file.flush()
print(flush=True)
sys.stdin.read()
"""


def test_owner_of_a_lock_is_found_without_write_access(tmp_path, monkeypatch):
    """As of the run of another user, or on a disk that became read-only."""
    lock, opened = tmp_path / "lock", Path.open
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        monkeypatch.setattr(Path, "open", lambda path, **text: opened(path, "r", **text))
        assert files.lock_owner(lock) == "process 1 on a"
        holder.stdin.close()
    assert files.lock_owner(lock) is None
