"""Planned steps with engines on ranks of their own or shared ones: docs/engine-ranks.md's table.

    python -m research.tools.engine_split [--models NAME ...] [--device h100]

No model and no device is needed: memory and FLOPs come from dry runs, seconds from the planner's
rates. For each model and workload the fastest layout of all devices that share their time is
compared with the fastest of all splits into ranks that train and ranks that generate.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.apps.planning.generation import Answers, workload_of
from megatron_rl.apps.planning.models import MODELS, write_config_json
from megatron_rl.apps.planning.rates import find_device
from megatron_rl.apps.planning.search import DryRuns, Option, Planner, search, shares
from megatron_rl.config import parse_config
from megatron_rl.runtime.processes import quiet_libraries

DEVICES = {"DeepSeek-R1-Distill-Qwen-1.5B": 64, "Qwen3-8B": 64, "Qwen2.5-32B": 128,
           "Qwen3-235B-A22B": 256}  # fmt: skip
RESPONSES = {"prompts_per_step": 512, "responses_per_prompt": 16, "max_response_tokens": 15360}
MEAN = 3000  # tokens of a response


@dataclass(frozen=True)
class Case:
    """Settings of one row: of both runs, and the answers of environments."""

    name: str
    lag: dict[str, Any]
    behavior: str = "actor"
    turns: int = 1
    answers: Answers | None = None


WINDOWS = {"batches": 1, "partial_rollouts": 4096}
CASES = (
    Case("whole responses", {"batches": 1}),
    Case("partial rollouts", WINDOWS, behavior="engine"),
    Case("4 turns, answers of 2 minutes", {"batches": 1}, turns=4, answers=Answers(120, 240)),
)


def plan(model: Path, case: Case, epochs: int, dry_runs: DryRuns | None, args: Any) -> list[Any]:
    """Return the dry runs, and the fastest layouts on shared and on separate ranks."""
    config = parse_config({
        "model": {"path": str(model)}, "data": {"train": "none.jsonl"},
        "behavior": case.behavior, "lag": case.lag, "rollout": RESPONSES,
        "trainer": {"epochs": epochs, "minibatches": 4},
    })  # fmt: skip
    device, devices = find_device(args.device), DEVICES[model.name]
    workload = workload_of(config, mean_response=MEAN, turns=case.turns, answers=case.answers)
    planner = Planner(config, MODELS[model.name], device, workload)
    dry_runs = dry_runs or DryRuns(config, workers=len(os.sched_getaffinity(0)))
    found: list[Any] = [dry_runs]
    for engine_ranks in (0, shares(device, devices)):
        result = search(planner, dry_runs, devices, {"engine_ranks": engine_ranks}, top=1)
        found.append(result.options[0] if result.options else None)
    return found


def format_row(name: str, epochs: int, case: Case, shared: Option, separate: Option) -> str:
    """Format a row of the table."""
    cells = (
        name, DEVICES[name], epochs, case.name, f"{shared.step_seconds:.0f}",
        f"{separate.step_seconds:.0f}", separate.layout.engine_ranks,
        f"{separate.step_seconds / shared.step_seconds:.2f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--device", default="h100")
    args = parser.parse_args()
    quiet_libraries()
    print("| model | devices | epochs | rollouts | shared | separate | of them generate | ratio |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            model = write_config_json(MODELS[name], Path(folder) / name)
            dry_runs = None
            for epochs in (1, 4):
                for case in CASES:
                    dry_runs, *options = plan(model, case, epochs, dry_runs, args)
                    if None in options:
                        print(f"| {name} | {case.name}: no layout fits |", flush=True)
                    else:
                        print(format_row(name, epochs, case, *options), flush=True)
            assert dry_runs is not None
            dry_runs.close()


if __name__ == "__main__":
    main()
