"""Recorded rollouts: reading them, and formatting them safely for a terminal."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_rl.errors import UserError
from megatron_rl.runs.rollout_tables import (
    MESSAGES,
    OBSERVED,
    PLACE,
    PROMPT_TEXT,
    read_observed,
)
from megatron_rl.types import REPLACES_HISTORY, Rollout

Row = dict[str, Any]
COLUMNS = (
    "prompt_index", "sample_index", "prompt", PROMPT_TEXT, "ground_truth", "data_source",
    "response", "reward", "reason", "extracted", "finish_reason", "weight_version", "advantage",
    "lag", PLACE, MESSAGES,
)  # fmt: skip  # without per-token columns
ENDINGS = {"length": "cut at the limit", "lost": "its environment was lost"}
# Control characters, and characters that are invisible or change the direction of text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps of a run directory with recorded rollouts; UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; give the folder of a run, as runs/NAME")
    files = (folder / "rollouts").glob("step_*.parquet")
    if steps := sorted(int(file.stem.rpartition("_")[2]) for file in files):
        return steps
    raise UserError(
        f"{folder} has no rollouts (rollouts/step_*.parquet): give the folder of a run that has "
        "trained a step, as runs/NAME"
    )


def read_rollouts(folder: Path, step: int) -> list[Row]:
    """Read the rollouts of one step in order, without per-token columns.

    Raises UserError if the step is not recorded or its file is damaged.
    """
    steps, file = recorded_steps(folder), folder / "rollouts" / f"step_{step:06d}.parquet"
    if step not in steps:
        raise UserError(
            f"{folder} has no rollouts of step {step}; choose one of its {len(steps)} recorded "
            f"steps from {steps[0]} to {steps[-1]}"
        )
    try:
        present = set(pq.read_schema(file).names)
        table = pq.read_table(
            file, columns=[name for name in (*COLUMNS, "token_ids", OBSERVED) if name in present]
        )
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is damaged: {error}; choose another step") from error
    index = table.column_names.index("token_ids")
    lengths = pc.list_value_length(table.column("token_ids"))
    rows = table.set_column(index, "tokens", lengths).to_pylist()
    return [_with_messages(row) if OBSERVED in row else row for row in rows]


def _with_messages(row: Row) -> Row:
    """Parse the messages of a conversation; `tokens` are then those that the policy sampled."""
    ranges = read_observed(row)
    row["tokens"] -= sum(end - first for first, end in ranges)
    del row[OBSERVED]
    return row | {"turns": len(ranges) + 1, MESSAGES: json.loads(row[MESSAGES])}


def rollout_row(rollout: Rollout) -> Row:
    """Build the row that `describe_rollout` formats from a rollout in memory."""
    response, grade_result = rollout.response, rollout.grade_result
    return {
        "prompt_index": rollout.prompt.index,
        "sample_index": response.sample_index,
        "prompt": rollout.prompt.messages[-1]["content"] if rollout.prompt.messages else "",
        PROMPT_TEXT: rollout.prompt.text,
        "ground_truth": rollout.prompt.ground_truth,
        "response": response.text,
        "reward": grade_result.reward,
        "reason": grade_result.reason,
        "extracted": grade_result.extracted,
        "finish_reason": response.finish_reason,
        "tokens": response.length,
        **(
            {"turns": response.turns, MESSAGES: list(response.messages)}
            if response.messages
            else {}
        ),
    }


def choose_rollouts(rows: Sequence[Row], *, order: str, count: int, seed: int) -> list[Row]:
    """Return the rollouts with the highest or lowest reward, or a random sample drawn by `seed`."""
    if order == "random":
        return random.Random(seed).sample(rows, min(count, len(rows)))
    return sorted(rows, key=lambda row: row["reward"], reverse=order == "best")[:count]


def printable(text: object) -> str:
    """Replace characters that are invisible, move the cursor or reorder text by their code."""
    return _UNSEEN.sub(lambda match: f"<{ord(match[0]):04x}>", str(text).replace("\r\n", "\n"))


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 2
    left_out = len(text) - most
    return f"{text[:head]} [... {left_out} characters ...] {text[len(text) - (most - head) :]}"


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return what the engine got: the decoded tokens of the prompt, special tokens included.

    Earlier runs recorded only the text of the last message.
    """
    return row.get(PROMPT_TEXT) or f"{row['prompt']} (the last message; tokens were not decoded)"


def response_text(row: Mapping[str, Any]) -> str:
    """Return the response, or a whole conversation with the role before each message."""
    messages = _messages(row)
    return "\n".join(f"{role}: {text}" for role, text in messages) or row["response"]


def _messages(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of each message of a conversation; empty without an environment.

    The role of the first message of a history that replaces everything before it begins with `new`.
    """
    return [
        ("new " * (REPLACES_HISTORY in one) + str(one.get("role")), str(one.get("content")))
        for one in row.get(MESSAGES, ())
    ]


def describe_rollout(row: Mapping[str, Any], *, most: int, indent: str = "  ") -> str:
    """Format one line with reward, reason and length, then prompt, response and answer."""
    lines = [
        f"{indent}prompt {row['prompt_index']}, response {row['sample_index'] + 1}: "
        f"reward {row['reward']:g} ({printable(row['reason'])}), {row['tokens']} tokens"
        + (f" in {row['turns']} turns, " if MESSAGES in row else ", ")
        + ENDINGS.get(row["finish_reason"], "ended by itself")
    ]
    parts = [("prompt", prompt_text(row))]
    parts += _messages(row) or [("response", row["response"])]
    if row["extracted"] is not None:
        parts.append(("extracted", row["extracted"]))
    parts.append(("truth", row["ground_truth"]))
    for name, text in parts:
        for number, line in enumerate(shorten(printable(text), most).split("\n")):
            lines.append(f"{indent}  {name if number == 0 else '':<9} | {line}".rstrip())
    return "\n".join(lines)
