"""Traced responses as the page shows them: each token with its log-probs at every epoch."""

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.objectives import Objective
from megatron_rl.objectives.spec import Bounds
from megatron_rl.report.runs import Run
from megatron_rl.report.traces import (
    Response,
    judge,
    objective_of,
    read_traced_groups,
    spread_out,
    traced_steps,
    why_unjudged,
)

BYTES_PER_TOKEN = 24  # of the page, beside those of each update
BYTES_PER_UPDATE = 12
BYTES_PER_SIBLING = 600


class Pieces:
    """Token ids as pieces of text, by the tokenizer that the run's model came with."""

    def __init__(self, run: Run) -> None:
        self._tokenizer: Any = None
        folders = (run.folder / "model", (run.config.get("model") or {}).get("path") or "")
        for folder in folders:
            file = Path(folder) / "tokenizer.json"
            if file.is_file():
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(file))
                return

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """One text per token; a character of several tokens stands at its last. None: unknown."""
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]


def build_life(
    runs: Sequence[Run], *, megabytes: float, order: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The traced responses of each run that has any, as many steps as fit into the page.

    The steps are spread evenly over the run; every run has an equal share of the room. Where that
    is not enough for one step of each, as many runs are there as fit, by `order` (of places).
    """
    room = megabytes * 1e6
    costs: dict[int, int] = {}
    for place in range(len(runs)) if order is None else order:
        steps = traced_steps(runs[place])
        if steps and room > 0:
            cost = _bytes(read_traced_groups(runs[place], steps[-1])) or 1
            if costs and cost > room:
                break
            costs[place] = cost
            room -= cost
    lives = []
    for place, cost in sorted(costs.items()):
        steps = traced_steps(runs[place])
        chosen = spread_out(steps, most=1 + max(0, int(room / len(costs) // cost)))
        lives.append(_life(runs[place], chosen, of=len(steps)) | {"run": place})
    return lives


def _bytes(groups: Sequence[Sequence[Response]]) -> int:
    """About what the groups add to the page."""
    total = 0
    for group in groups:
        for response in group:
            tokens = 0 if response.policy is None else response.policy.size
            updates = 1 if response.policy is None else len(response.policy)
            total += BYTES_PER_SIBLING + len(response.row["response"] or "")
            total += tokens * BYTES_PER_UPDATE + tokens // updates * BYTES_PER_TOKEN
    return total


def _life(run: Run, steps: Sequence[int], *, of: int) -> dict[str, Any]:
    objective, pieces = objective_of(run), Pieces(run)
    groups = [
        _group(responses, objective, pieces) | {"step": step}
        for step in steps
        for responses in read_traced_groups(run, step)
    ]
    return {
        "objective": describe_objective(objective),
        "unjudged": why_unjudged(run),
        "has_pieces": pieces.of([]) is not None,
        "steps": len(steps),
        "steps_traced": of,
        "groups": groups,
    }


def describe_objective(objective: Objective | None) -> dict[str, Any] | None:
    """What the page needs to draw the bounds; decisions are made here."""
    if objective is None:
        return None
    constraint = objective.spec.constraint
    bounds = asdict(constraint) if isinstance(constraint, Bounds) else None
    return {
        "weight": objective.spec.weight, "constraint": type(constraint).__name__, "bounds": bounds
    }  # fmt: skip


def _group(
    responses: Sequence[Response], objective: Objective | None, pieces: Pieces
) -> dict[str, Any]:
    row = responses[0].row
    return {
        "prompt_index": row["prompt_index"],
        "prompt": row["prompt"],
        "truth": row["ground_truth"],
        "source": row["data_source"],
        "responses": [_response(response, objective, pieces) for response in responses],
    }


def _response(response: Response, objective: Objective | None, pieces: Pieces) -> dict[str, Any]:
    row = response.row
    shown: dict[str, Any] = {
        "sample": row["sample_index"],
        "reward": row["reward"],
        "advantage": row["advantage"],
        "reason": row["reason"],
        "extracted": row["extracted"],
        "finish": row["finish_reason"],
        "length": len(row["token_ids"]),
        "text": row["response"],
    }
    if response.policy is None or not response.behavior.size:
        return shown
    texts, engine = pieces.of(row["token_ids"]), response.engine
    if texts is not None:
        shown["text"] = None  # the tokens say it
    shown["trace"] = {
        "pieces": texts,
        "ids": row["token_ids"],
        "behavior": _packed(response.behavior),
        "engine": _packed(np.full_like(response.behavior, np.nan) if engine is None else engine),
        "policy": [_packed(line) for line in response.policy],
    }
    if objective is not None:
        weights, kept = judge(response, objective)
        shown["trace"] |= {
            "log_weight": [_packed(line) for line in weights],
            "kept": ["".join("01"[int(one)] for one in line) for line in kept],
        }
    return shown


def _packed(values: np.ndarray) -> str:
    """float32, little-endian, in base 64: every bit of it, in fewer bytes than digits take."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
