"""The responses that a run followed through their reuse, and what its objective made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import Objective, build_objective
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.report.runs import Run


@dataclass(frozen=True, eq=False)
class Response:
    """One response of a traced group."""

    row: dict[str, Any]  # of the step's rollouts
    policy: np.ndarray | None  # [updates, L] float32, None where it was not traced

    @property
    def behavior(self) -> np.ndarray:
        """Its log-probs under the policy that generated it; [L] float32."""
        return np.array(self.row["behavior_logprobs"], np.float32)

    @property
    def engine(self) -> np.ndarray | None:
        """Those that the engine reported; None where no engine did (offline data)."""
        values = self.row["rollout_logprobs"]
        return None if values is None else np.array(values, np.float32)

    @property
    def log_ratio(self) -> np.ndarray:
        """Policy minus behavior at each update; [updates, L] float64."""
        assert self.policy is not None, "only of what was traced"
        return self.policy.astype(np.float64) - self.behavior.astype(np.float64)


def traced_steps(run: Run) -> list[int]:
    """The steps of which a run kept traces."""
    return sorted(int(file.stem.rpartition("_")[2]) for file in _folder(run).glob("step_*.parquet"))


def _folder(run: Run) -> Path:
    return run.folder / "traces"


def read_traced_groups(run: Run, step: int) -> list[list[Response]]:
    """The groups of one step in which a response was traced, each with all its responses."""
    name = f"step_{step:06d}.parquet"
    rollouts = run.folder / "rollouts" / name
    if not rollouts.is_file():  # somebody cleaned up
        return []
    traced = _read(_folder(run) / name).to_pydict()
    policy = {
        place: np.array(rows, np.float32)
        for place, rows in zip(traced["rollout"], traced["policy_logprobs"], strict=True)
    }
    table = _read(rollouts)
    prompts = table.column("prompt_index").to_pylist()
    samples = table.column("sample_index").to_pylist()
    starts = [
        place
        for place, prompt in enumerate(prompts)
        if place == 0 or prompt != prompts[place - 1] or samples[place] <= samples[place - 1]
    ]
    groups = []
    for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True):
        if any(start <= place < end for place in policy):
            rows = table.slice(start, end - start).to_pylist()
            groups.append([Response(row, policy.get(start + i)) for i, row in enumerate(rows)])
    return groups


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file} is damaged: {error}; remove it, and the report does without this step"
        ) from error


def spread_out(steps: Sequence[int], *, most: int) -> list[int]:
    """At most so many of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    if most < 2:
        return list(steps[-most:]) if most else []
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def objective_of(run: Run) -> Objective | None:
    """What the run was trained with; None where `why_unjudged` says why that tells nothing."""
    objective = _build(run)
    if isinstance(objective, Objective) and why_unjudged(run) is None:
        return objective
    return None


def why_unjudged(run: Run) -> str | None:
    """Why decisions do not follow from the log-probs of one response; None where they do."""
    objective = _build(run)
    if objective is None:
        return "this release does not know its objective"
    if not isinstance(objective, Objective):
        return "its loss has no weight of a token"
    if not can_be_judged(objective):
        return "every update sets its bound anew, by a whole minibatch"
    if run.config.get("behavior") == "engine" and "rollout_logprobs" in objective.needs:
        return "its ratios are to a policy of which nothing is kept"
    return None


def _build(run: Run) -> PolicyObjective | None:
    choices = dict(run.config.get("objective") or {})
    try:
        return build_objective(str(choices.pop("name", None)), **choices)
    except ValueError:  # of another release
        return None


def can_be_judged(objective: PolicyObjective) -> TypeGuard[Objective]:
    """Whether its decisions follow from the log-probs of one response."""
    return isinstance(objective, Objective) and objective.is_fitted


@torch.no_grad()
def judge(response: Response, objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    """The objective's own log-weight and whether its constraint left it alone, at each update.

    By the functions that training calls, on the log-probs that it saw; two [updates, L].
    """
    assert response.policy is not None, "only of what was traced"
    row, length = response.row, response.behavior.size
    layout = SequenceLayout([length], torch.ones(length, dtype=torch.bool))
    behavior, engine = torch.from_numpy(response.behavior), response.engine
    weights, kept = [], []
    for policy in torch.from_numpy(response.policy):
        x = TokenInputs(
            policy_logprobs=policy,
            behavior_logprobs=behavior,
            advantages=torch.full((length,), row["advantage"]),
            rollout_logprobs=None if engine is None else torch.from_numpy(engine),
        )
        weighed = objective.weigh(x, layout)
        weights.append(weighed.log_weight.numpy())
        kept.append(weighed.kept.numpy())
    return np.stack(weights), np.stack(kept)
