"""Answers to settings and commands of users who come from verl or TRL."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.config.other_trainers_keys import NONE, TRL, VERL

PAGE = "docs/coming-from.md"
_ROOTS = {key.partition(".")[0] for key in VERL if "." in key}
# Rows of what keys are usually named by their last parts alone, such as `rollout.n`.
_POLICY = ("data.", "algorithm.", "trainer.", *(
    f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model")))  # fmt: skip
_PARENTS = {key[:end] for key in VERL for end, one in enumerate(key) if one == "."}


def unknown_keys(key: str, value: Any) -> list[str]:
    """Describe the settings of verl or TRL below an unknown key; empty if it is none of theirs.

    Settings of one section that has no counterpart as a whole are described together.
    """
    groups: dict[str, list[str]] = {}
    for leaf in _leaves(key, value):
        groups.setdefault(_row(leaf) or leaf, []).append(leaf)
    messages = []
    for row, leaves in groups.items():
        is_section = len(leaves) > 1 and VERL.get(row, "").startswith(NONE)
        shown = [f"{leaves[0]} and {len(leaves) - 1} more"] if is_section else leaves
        messages += [_describe(leaf, row) for leaf in shown]
    return [message for message in messages if message is not None]


def answer_command(words: Sequence[str]) -> list[str]:
    """Describe the settings of verl or TRL in a command line, given as key=value or as options."""
    problems: list[str] = []
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and place + 1 < len(words):
            value = words[place + 1]
        if equals or word.startswith("--"):
            problems += unknown_keys(key.lstrip("-+~"), value)
    return list(dict.fromkeys(problems))


def _leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the keys below one, down to those that have a row of their own."""
    is_row = key in VERL or key in TRL
    if isinstance(value, dict) and value and (key in _PARENTS or not is_row):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _row(key: str) -> str | None:
    """Find the row of a key of TRL, or of verl, given in full or by its last parts."""
    if key in TRL:
        return key
    parts = key.split(".")
    starts = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    for start in starts:
        if start in VERL:
            return start
    for start in starts:
        ends = [name for name in VERL if name.endswith(f".{start}") and name.startswith(_POLICY)]
        is_clear = "." in start or "_" in start or start == "lr"
        if is_clear and len(ends) == 1:
            return ends[0]
    return None


def _describe(key: str, row: str) -> str | None:
    tool, table = ("TRL", TRL) if row in TRL else ("verl", VERL)
    if row not in table:
        if row.partition(".")[0] not in _ROOTS - {"data", "trainer", "reward", "model", "critic"}:
            return None
        text = f"verl 0.9.1 has no {row}"
        return f"{key}: unknown key; it begins as verl's, but {text} ({PAGE}); leave it out"
    if table[row].startswith(NONE):
        reason = table[row].removeprefix(NONE)
        return (
            f"{key}: unknown key; {tool}'s {row} has no counterpart here: {reason} ({PAGE}); "
            "leave it out"
        )
    return f"{key}: unknown key; for {tool}'s {row} set {table[row]} ({PAGE})"
