"""Traced responses in the page: the log-probs of each token at every epoch."""

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.apps.report.runs import Run
from megatron_rl.apps.report.traces import (
    TracedResponse,
    objective_of,
    read_traced_groups,
    replay_constraint,
    spread_out,
    traced_steps,
    why_no_decisions,
)
from megatron_rl.objectives import Objective
from megatron_rl.objectives.spec import Bounds
from megatron_rl.runs.rollouts import TURN_ADVANTAGES, read_observed, read_restarts
from megatron_rl.types import sampled_ranges

BYTES_PER_TOKEN = 24  # in the page, besides BYTES_PER_UPDATE
BYTES_PER_UPDATE = 12
BYTES_PER_SIBLING = 600


class Pieces:
    """Conversion of token ids to text with the tokenizer of the run's model."""

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
        """Return one text per token, with multi-token characters at their last; None if unknown."""
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]


def build_life(
    runs: Sequence[Run], *, megabytes: float, order: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Return the traced responses of each run that has any, for as many steps as fit in the page.

    Steps are spread evenly over the run, and runs have equal shares of the size limit. If one step
    of each run does not fit, runs are added by `order` (indices) while they fit.
    """
    room = megabytes * 1e6
    costs: dict[int, int] = {}
    for index in range(len(runs)) if order is None else order:
        steps = traced_steps(runs[index])
        if steps and room > 0:
            cost = _bytes(read_traced_groups(runs[index], steps[-1])) or 1
            if costs and cost > room:
                break
            costs[index] = cost
            room -= cost
    lives = []
    for index, cost in sorted(costs.items()):
        steps = traced_steps(runs[index])
        chosen = spread_out(steps, most=1 + max(0, int(room / len(costs) // cost)))
        lives.append(_life(runs[index], chosen, of=len(steps)) | {"run": index})
    return lives


def _bytes(groups: Sequence[Sequence[TracedResponse]]) -> int:
    """Estimate the size of the groups in the page."""
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
        "no_decisions": why_no_decisions(run),
        "has_pieces": pieces.of([]) is not None,
        "steps": len(steps),
        "steps_traced": of,
        "groups": groups,
    }


def describe_objective(objective: Objective | None) -> dict[str, Any] | None:
    """Return the data that the page needs to draw the bounds."""
    if objective is None:
        return None
    constraint = objective.spec.constraint
    bounds = asdict(constraint) if isinstance(constraint, Bounds) else None
    return {
        "weight": objective.spec.weight, "constraint": type(constraint).__name__, "bounds": bounds
    }  # fmt: skip


def _group(
    responses: Sequence[TracedResponse], objective: Objective | None, pieces: Pieces
) -> dict[str, Any]:
    row = responses[0].row
    return {
        "prompt_index": row["prompt_index"],
        "prompt": row["prompt"],
        "truth": row["ground_truth"],
        "source": row["data_source"],
        "responses": [_response(response, objective, pieces) for response in responses],
    }


def _response(
    response: TracedResponse, objective: Objective | None, pieces: Pieces
) -> dict[str, Any]:
    row = response.row
    observed, restarts = read_observed(row), read_restarts(row)
    shown: dict[str, Any] = {
        "sample": row["sample_index"],
        "reward": row["reward"],
        "advantage": row["advantage"],
        "turn_advantages": row.get(TURN_ADVANTAGES),
        "reason": row["reason"],
        "extracted": row["extracted"],
        "finish": row["finish_reason"],
        "length": len(row["token_ids"]) - sum(end - first for first, end in observed),
        "turns": len(observed) + 1,
        "histories": len(restarts) + 1,
        "text": row["response"],
    }
    if response.policy is None or not response.behavior.size:
        return shown
    ids, engine = row["token_ids"], response.engine
    texts = pieces.of(ids)
    if texts is not None:
        shown["text"] = None  # the pieces contain the text
    shown["trace"] = {
        "pieces": None if texts is None else _sampled(texts, observed),
        "ids": _sampled(ids, observed),
        "observed": _place_observations(texts or [f"#{token} " for token in ids], observed),
        "restarts": _place_restarts(restarts, observed),
        "behavior": _packed(response.behavior),
        "engine": _packed(np.full_like(response.behavior, np.nan) if engine is None else engine),
        "policy": [_packed(line) for line in response.policy],
    }
    if objective is not None:
        weights, kept = replay_constraint(response, objective)
        shown["trace"] |= {
            "log_weight": [_packed(line) for line in weights],
            "kept": ["".join("01"[int(flag)] for flag in line) for line in kept],
        }
    return shown


def _sampled(items: Sequence[Any], observed: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the items of the tokens that the policy sampled; [L]."""
    spans = sampled_ranges(observed, len(items))
    return [item for first, end in spans for item in items[first:end]]


def _place_observations(
    texts: Sequence[str], observed: Sequence[tuple[int, int]]
) -> list[tuple[int, str]]:
    """Return the text of each observation with the index of the sampled token that follows it."""
    places, before = [], 0
    for first, end in observed:
        places.append((first - before, "".join(texts[first:end])))
        before += end - first
    return places


def _place_restarts(restarts: Sequence[int], observed: Sequence[tuple[int, int]]) -> list[int]:
    """Return the index of the sampled token that follows each history that replaces another."""
    return [
        place - sum(end - first for first, end in observed if first < place) for place in restarts
    ]


def _packed(values: np.ndarray) -> str:
    """Encode as little-endian float32 in base64, which is exact and smaller than decimals."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
