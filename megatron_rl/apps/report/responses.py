"""Responses of some steps of a run with their rewards, to browse in the page."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.apps.report.runs import Run
from megatron_rl.apps.report.traces import spread_out
from megatron_rl.runs.rollouts import prompt_text, read_rollouts, response_text, shorten

STEPS = 16  # that are read, of all runs together
RESPONSES = 24  # of a step, spread over its rewards
CHARACTERS = 2000  # of a text; the middle of longer ones is left out
SHARE = 0.25  # of the bytes that recorded responses may add to the page


def build_responses(
    runs: Sequence[Run], *, megabytes: float, order: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the responses of some steps of each run: the last, the first, and steps between them.

    order: indices of runs, of which the first ones are shown if there are too many.
    """
    recorded = {index: _recorded_steps(runs[index]) for index in order}
    chosen = [index for index in order if recorded[index]][:STEPS]
    shown = []
    for index in sorted(chosen):
        room = SHARE * megabytes * 1e6 / len(chosen)
        steps = spread_out(recorded[index], most=max(1, STEPS // len(chosen)))
        kept: dict[int, list[dict[str, Any]]] = {}
        for step in dict.fromkeys((steps[-1], steps[0], *reversed(steps))):
            rows = [
                _shown(row) for row in _spread_by_reward(read_rollouts(runs[index].folder, step))
            ]
            room -= sum(len(text.encode()) for row in rows for text in map(str, row.values()))
            if room < 0:
                break
            kept[step] = rows
        if kept:
            steps_shown = [{"step": step, "rows": kept[step]} for step in sorted(kept)]
            shown.append({"run": index, "recorded": len(recorded[index]), "steps": steps_shown})
    return shown


def _recorded_steps(run: Run) -> list[int]:
    files = (run.folder / "rollouts").glob("step_*.parquet")
    return sorted(int(file.stem.rpartition("_")[2]) for file in files)


def _spread_by_reward(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most RESPONSES rows from the lowest to the highest reward."""
    ordered = sorted(rows, key=lambda row: row["reward"])
    return [ordered[place] for place in spread_out(range(len(ordered)), most=RESPONSES)]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    texts = {
        "prompt": prompt_text(row), "response": response_text(row), "truth": row["ground_truth"],
        "reason": row["reason"], "extracted": row["extracted"],
    }  # fmt: skip
    return {
        name: None if text is None else shorten(str(text), CHARACTERS)
        for name, text in texts.items()
    } | {"reward": row["reward"], "tokens": row["tokens"], "finish": row["finish_reason"],
         "place": [row["prompt_index"], row["sample_index"] + 1]}  # fmt: skip
