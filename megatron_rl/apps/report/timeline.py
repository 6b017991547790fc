"""Timeline of a report: what each group of ranks did when, in a run's last steps."""

from typing import Any

from megatron_rl.apps.report.runs import Run
from megatron_rl.runs.files import PHASES, TIMELINE, read_rows

MAX_TIMELINE_STEPS = 20
NEARLY = 0.001  # seconds; a resumed run leaves a longer gap between two steps
WAITS = ("rollout", "eval")  # phases in which trainers wait for engines on ranks of their own


def build_timeline(run: Run, *, most: int) -> dict[str, Any] | None:
    """Return the intervals of a run's last steps, at most `most`; None if none is recorded.

    `steps`: numbers of the steps. `ends`: the start of the first step, which is 0, then the end of
    each, in seconds. `ranks`: for each group of ranks the intervals [index in PHASES, start,
    seconds] of its first rank, in order and inside of these steps; what lies between them is
    waiting. Steps before a resume are left out.
    """
    rows = read_rows(run.folder / TIMELINE)[-most:]
    for place in range(len(rows) - 1, 0, -1):
        before, row = rows[place - 1], rows[place]
        if abs(before["start"] + before["seconds"] - row["start"]) > NEARLY:
            rows = rows[place:]
            break
    if not rows:
        return None
    zero = rows[0]["start"]
    ends = [0.0, *(row["start"] + row["seconds"] - zero for row in rows)]
    ranks: dict[str, list[list[Any]]] = {name: [] for row in rows for name in row["ranks"]}
    for row in rows:
        for name, intervals in row["ranks"].items():
            for phase, start, seconds in intervals:
                begin = max(row["start"] - zero + start, 0.0)
                length = min(row["start"] - zero + start + seconds, ends[-1]) - begin
                is_waiting = name == "trainers" and phase in WAITS
                if length > 0 and phase in PHASES and not is_waiting:
                    ranks[name].append([PHASES.index(phase), begin, length])
    return {
        "steps": [row["step"] for row in rows],
        "ends": ends,
        "ranks": {name: sorted(one, key=lambda each: each[1]) for name, one in ranks.items()},
    }
