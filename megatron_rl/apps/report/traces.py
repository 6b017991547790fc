"""Traced responses of a run, and its objective's weights and decisions for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rl.apps.report.runs import Run
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.errors import UserError
from megatron_rl.objectives import Objective, build_objective
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.runs.rollouts import PLACE, TURN_ADVANTAGES, read_observed
from megatron_rl.types import sampled_ranges


@dataclass(frozen=True, eq=False)
class TracedResponse:
    """Response of a group with traced responses."""

    row: dict[str, Any]  # row of the step's rollouts
    policy: np.ndarray | None  # [updates, L] float32; None if not traced

    @property
    def behavior(self) -> np.ndarray:
        """Log-probs under the behavior policy; [L] float32."""
        return np.array(self.row["behavior_logprobs"], np.float32)

    @property
    def engine(self) -> np.ndarray | None:
        """Log-probs reported by the engine; None without an engine (offline data)."""
        values = self.row["rollout_logprobs"]
        return None if values is None else np.array(values, np.float32)

    @property
    def log_ratio(self) -> np.ndarray:
        """Policy minus behavior at each update; [updates, L] float64."""
        assert self.policy is not None, "requires a traced response"
        return self.policy.astype(np.float64) - self.behavior.astype(np.float64)


def traced_steps(run: Run) -> list[int]:
    """Return the steps with traces."""
    return sorted(int(file.stem.rpartition("_")[2]) for file in _folder(run).glob("step_*.parquet"))


def _folder(run: Run) -> Path:
    return run.folder / "traces"


def read_traced_groups(run: Run, step: int) -> list[list[TracedResponse]]:
    """Read a step's groups with at least one traced response, each with all its responses."""
    name = f"step_{step:06d}.parquet"
    rollouts = run.folder / "rollouts" / name
    if not rollouts.is_file():  # rollouts may have been deleted
        return []
    traced = _read(_folder(run) / name).to_pydict()
    policy = {
        index: np.array(rows, np.float32)
        for index, rows in zip(traced["rollout"], traced["policy_logprobs"], strict=True)
    }
    table = _read(rollouts)
    # Traces refer to rows by their index in the step, which thinned files store in a column.
    is_thinned = PLACE in table.column_names
    indices = table.column(PLACE).to_pylist() if is_thinned else range(len(table))
    prompts = table.column("prompt_index").to_pylist()
    samples = table.column("sample_index").to_pylist()
    starts = [
        i
        for i, prompt in enumerate(prompts)
        if i == 0 or prompt != prompts[i - 1] or samples[i] <= samples[i - 1]
    ]
    groups = []
    for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True):
        if any(index in policy for index in indices[start:end]):
            rows = table.slice(start, end - start).to_pylist()
            traces = map(policy.get, indices[start:end])
            groups.append([TracedResponse(*pair) for pair in zip(rows, traces, strict=True)])
    return groups


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{file} is damaged: {error}; remove it to create the report without this step"
        ) from error


def spread_out(steps: Sequence[int], *, most: int) -> list[int]:
    """Select at most `most` steps, evenly spread, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    if most < 2:
        return list(steps[-most:]) if most else []
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def objective_of(run: Run) -> Objective | None:
    """Return the run's objective; None if it has no decisions per response (`why_no_decisions`)."""
    objective = _build(run)
    if isinstance(objective, Objective) and why_no_decisions(run) is None:
        return objective
    return None


def why_no_decisions(run: Run) -> str | None:
    """Return why decisions cannot be computed from one response's log-probs; None if they can."""
    objective = _build(run)
    if objective is None:
        return "its objective is unknown to this release"
    if not isinstance(objective, Objective):
        return "its loss gives tokens no weight"
    if not has_decisions_per_response(objective):
        return "every update computes its bound from a whole minibatch, which is not recorded"
    if run.config.get("behavior") == "engine" and "rollout_logprobs" in objective.needs:
        return "its ratios refer to a policy whose log-probs were not recorded"
    return None


def _build(run: Run) -> PolicyObjective | None:
    choices = dict(run.config.get("objective") or {})
    try:
        return build_objective(str(choices.pop("name", None)), **choices)
    except ValueError:  # of another release
        return None


def has_decisions_per_response(objective: PolicyObjective) -> TypeGuard[Objective]:
    """Return whether decisions depend only on the log-probs of one response."""
    return isinstance(objective, Objective) and objective.is_resolved


@torch.no_grad()
def replay_constraint(
    response: TracedResponse, objective: Objective
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the log-weights and the constraint's kept tokens at each update, [updates, L] each.

    Uses the training code on the recorded log-probs.
    """
    assert response.policy is not None, "requires a traced response"
    row, length = response.row, response.behavior.size
    layout = SequenceLayout([length], torch.ones(length, dtype=torch.bool))
    behavior, engine = torch.from_numpy(response.behavior), response.engine
    advantages = np.full(length, row["advantage"], np.float32)
    if row.get(TURN_ADVANTAGES) is not None:
        turns = sampled_ranges(read_observed(row), len(row["token_ids"]))
        sizes = [end - first for first, end in turns]
        advantages = np.repeat(np.array(row[TURN_ADVANTAGES], np.float32), sizes)
    weights, kept = [], []
    for policy in torch.from_numpy(response.policy):
        x = TokenInputs(
            policy_logprobs=policy,
            behavior_logprobs=behavior,
            advantages=torch.from_numpy(advantages),
            rollout_logprobs=None if engine is None else torch.from_numpy(engine),
        )
        weighed = objective.weigh(x, layout)
        weights.append(weighed.log_weight.numpy())
        kept.append(weighed.kept.numpy())
    return np.stack(weights), np.stack(kept)
