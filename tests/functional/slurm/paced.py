"""A verifier that is slow while a file exists: tests use it to keep a run between two steps.

It is next to no installed module: a launch has to package it.
"""

import contextlib
import time
from pathlib import Path


def score(text: str, ground_truth: str, data_source: str) -> float:
    """Grade the end of the answer, after the seconds in the run's file `pace`."""
    pace = Path("../../../pace")  # a job starts in the source of its launch
    with contextlib.suppress(FileNotFoundError):  # never paced, or no longer
        time.sleep(float(pace.read_text()))
    return float(text.strip().endswith(ground_truth))
