"""The rows that a run leaves in its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

PHASES = (
    "rollout", "reward", "pack", "behavior", "reference", "train", "sync", "eval", "record",
    "checkpoint",
)  # fmt: skip  # of `time/`; they add up to `time/step`


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete rows of a run directory; a last line cut short by a kill is left out."""
    return read_rows(folder / "metrics.jsonl")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The complete rows of a file of JSON lines; none where there is no file."""
    rows = []
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # an interrupted append
                break
            raise ValueError(f"{file}, line {number} is damaged: {error}; repair it") from error
    return rows


def evaluation_scores(folder: Path, *, metric: str | None = None) -> dict[int, float]:
    """The score of each evaluated step of a run directory, in [0, 1].

    metric: the one that counts, by default the mean of avg@k over the sets.
    """
    scores = {}
    for row in read_metrics(folder):
        average = [key for key in row if key.startswith("eval/") and "/avg@" in key]
        found = [row.get(key) for key in (average if metric is None else [metric])]
        known = [value for value in found if value is not None]
        if known and len(known) == len(found):
            scores[row["step"]] = sum(known) / len(known)
    return scores
