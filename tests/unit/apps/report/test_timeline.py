"""The last steps of a run's timeline.jsonl, as a report draws them."""

import json
from types import SimpleNamespace

from megatron_rl.apps.report.build import build_timeline
from megatron_rl.runs.files import PHASES

ROLLOUT, TRAIN, SYNC = (PHASES.index(name) for name in ("rollout", "train", "sync"))


def timeline_of(folder, *rows, most=20):
    lines = [json.dumps(dict(zip(("step", "start", "seconds", "ranks"), row, strict=True)))
             for row in rows]  # fmt: skip
    (folder / "timeline.jsonl").write_text("".join(line + "\n" for line in lines))
    return build_timeline(SimpleNamespace(folder=folder), most=most)


def test_run_of_earlier_release_has_no_timeline(tmp_path):
    assert build_timeline(SimpleNamespace(folder=tmp_path), most=20) is None


def test_engines_are_placed_in_steps_before_their_results_arrived(tmp_path):
    """Generation from 1 s before step 1 until 6 s, when step 2 has begun, and arrives in step 2."""
    got = timeline_of(
        tmp_path,
        (1, 100.0, 5.0, {"trainers": [["train", 0.5, 3.0], ["rollout", 3.5, 1.0]], "engines": []}),
        (2, 105.0, 4.0, {"trainers": [["train", 1.0, 2.0], ["eval", 3.0, 1.0]],
                         "engines": [["sync", 1.0, 0.5], ["rollout", -6.0, 7.0]]}),
    )  # fmt: skip
    assert got == {
        "steps": [1, 2],
        "ends": [0.0, 5.0, 9.0],
        "ranks": {
            "trainers": [[TRAIN, 0.5, 3.0], [TRAIN, 6.0, 2.0]],  # the others are waits
            "engines": [[ROLLOUT, 0.0, 6.0], [SYNC, 6.0, 0.5]],
        },
    }


def test_all_ranks_generate_and_only_last_steps_after_resume_are_shown(tmp_path):
    rows = [(step, 100.0 + 2 * step, 2.0, {"all ranks": [["rollout", 0.0, 1.0]]})
            for step in range(1, 6)]  # fmt: skip
    assert timeline_of(tmp_path, *rows)["steps"] == [1, 2, 3, 4, 5]
    assert timeline_of(tmp_path, *rows, most=2) == {
        "steps": [4, 5],
        "ends": [0.0, 2.0, 4.0],
        "ranks": {"all ranks": [[ROLLOUT, 0.0, 1.0], [ROLLOUT, 2.0, 1.0]]},
    }
    later = [(step, start + 60.0 * (step > 3), *rest) for step, start, *rest in rows]
    assert timeline_of(tmp_path, *later)["steps"] == [4, 5]
