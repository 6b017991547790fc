"""Traced responses of a run: log-probs of each token at every epoch, weights, gates, positions."""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rl.apps.report.runs import Run, RunGroup
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.errors import UserError
from megatron_rl.objectives import Objective, build_objective
from megatron_rl.objectives.inputs import TokenInputs
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.objectives.spec import Bounds, SecondMoment
from megatron_rl.runs.rollouts import PLACE, TURN_ADVANTAGES, read_observed, read_restarts
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
    """Return the run's objective; None without decisions per response (`reason_no_decisions`)."""
    objective = _build(run)
    if isinstance(objective, Objective) and reason_no_decisions(run) is None:
        return objective
    return None


def reason_no_decisions(run: Run) -> str | None:
    """Return why decisions cannot be computed from one response's log-probs; None if they can."""
    objective = _build(run)
    if objective is None:
        return "its objective is unknown to this release"
    if not isinstance(objective, Objective):
        return "its loss gives tokens no weight"
    if not has_decisions_per_response(objective):
        return "every update computes its bound from a whole minibatch, which is not recorded"
    spec = objective.spec
    of_sign = not spec.is_unsigned or not spec.negative or spec.off_policy_mask is not None
    if run.config.get("critic") is not None and of_sign:
        return "they depend on the critic's advantages of each token, which are not recorded"
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
    return isinstance(objective, Objective) and not isinstance(
        objective.spec.constraint, SecondMoment
    )


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
        weighed = objective.compute_weights(x, layout)
        weights.append(weighed.log_weight.numpy())
        kept.append(weighed.kept.numpy())
    return np.stack(weights), np.stack(kept)


SCALES = ("local", "cumulative", "sequence", "prefix")
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
MIN_TOKENS = 8
TENTHS = tuple(f"{tenth / 10:.1f}" for tenth in range(1, 11))
BAND = ("acceptance", "prefix_mean_log_std", "prefix_mean_log_q05", "prefix_mean_log_median",
        "prefix_mean_log_q95")  # fmt: skip


def four_log_ratios(log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """Compute local l_t, cumulative S_t, sequence S_L / L and prefix S_t / t; [updates, L] each."""
    total = log_ratio.cumsum(axis=1)
    position = np.arange(1, log_ratio.shape[1] + 1)
    sequence = np.broadcast_to(total[:, -1:] / log_ratio.shape[1], log_ratio.shape)
    return {
        "local": log_ratio, "cumulative": total, "sequence": sequence, "prefix": total / position
    }  # fmt: skip


def ratios_by_position(
    group: RunGroup, *, most_steps: int, most_bins: int
) -> dict[str, Any] | None:
    """Compute spread and quantiles of the four log-ratios over a group's traced responses.

    Values are binned by position t in bins of equal width, and by epoch of reuse. Bins with fewer
    than MIN_TOKENS tokens are omitted. Returns None if no response was traced.
    """
    traced = [
        response.log_ratio
        for run in group.runs
        for step in spread_out(traced_steps(run), most=most_steps)
        for responses in read_traced_groups(run, step)
        for response in responses
        if response.policy is not None and response.behavior.size
    ]
    if not traced:
        return None
    epochs = max(len(rows) for rows in traced)
    longest = max(rows.shape[1] for rows in traced)
    width = -(-longest // most_bins)
    bins = -(-longest // width)
    cells: dict[tuple[str, int, int], list[np.ndarray]] = {}
    for rows in traced:
        for name, values in four_log_ratios(rows).items():
            for epoch, line in enumerate(values):
                for b in range(-(-line.size // width)):
                    part = line[b * width : (b + 1) * width]
                    cells.setdefault((name, epoch, b), []).append(part)
    joined = {cell: np.concatenate(parts) for cell, parts in cells.items()}
    sizes = {cell: values.size for cell, values in joined.items()}
    filled = [
        b
        for b in range(bins)
        if min(sizes.get(("local", e, b), 0) for e in range(epochs)) >= MIN_TOKENS
    ]

    def table(name: str, compute: Any) -> list[list[float]]:
        return [[float(compute(joined[name, e, b])) for b in filled] for e in range(epochs)]

    return {
        "responses": len(traced),
        "positions": [b * width + (width + 1) / 2 for b in filled],
        "epochs": epochs,
        "scales": {
            name: {"std": table(name, np.std)}
            | {key: table(name, lambda x, q=q: np.quantile(x, q)) for key, q in QUANTILES.items()}
            for name in SCALES
        },
    }


def gate_by_position(group: RunGroup, *, most_steps: int) -> dict[str, Any] | None:
    """Compute acceptance, spread and quantiles of log w_t per tenth of t / L and epoch of reuse.

    Values are means of the runs' metrics, over all steps and for some single steps. Returns None
    if no run has these metrics.
    """
    rows = [row for run in group.runs for row in run.rows[:: run.every] if "reward/mean" in row]
    epochs = max((int(key[6 : key.index("/")]) for row in rows for key in row
                  if key.startswith("epoch_") and "/by_fraction/" in key), default=0)  # fmt: skip
    if not epochs:
        return None
    steps = spread_out(sorted({row["step"] for row in rows}), most=most_steps)
    return {
        "epochs": epochs,
        "steps": steps,
        "all": _gate_tables(rows, epochs),
        "each": [_gate_tables([r for r in rows if r["step"] == step], epochs) for step in steps],
    }


def _gate_tables(rows: Sequence[dict[str, Any]], epochs: int) -> dict[str, list]:
    """Return an [epochs][tenths] table for each of BAND; None for missing values."""

    def mean(epoch: int, tenth: str, name: str) -> float | None:
        key = f"epoch_{epoch}/by_fraction/{tenth}/{name}"
        values = [row[key] for row in rows if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    return {
        name: [[mean(epoch, tenth, name) for tenth in TENTHS] for epoch in range(1, epochs + 1)]
        for name in BAND
    }


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


def build_histories(
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
        "no_decisions": reason_no_decisions(run),
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
