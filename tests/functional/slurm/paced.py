"""A verifier that takes its time while a file is there: how a test holds a run between two steps.

It lies beside no installed module: a launch has to package it.
"""

import os
import time


def score(text: str, ground_truth: str, data_source: str) -> float:
    """Whether the answer ends right; a quarter of a second later while the run is paced."""
    if os.path.exists("../../../pace"):  # a job starts in the source of its launch
        time.sleep(0.25)
    return float(text.strip().endswith(ground_truth))
