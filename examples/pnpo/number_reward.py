"""The reward of `real_model.yaml`, as a user writes one: the last number of the response."""

import re


def score(text: str, ground_truth: str, data_source: str) -> float:
    """Return 1 if the last number in the response is the answer."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(numbers[-1:] == [ground_truth])
