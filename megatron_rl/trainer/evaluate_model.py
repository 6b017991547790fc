"""Evaluation of a model outside of training, with the same engine, graders and scores."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.actor import groups
from megatron_rl.actor.weights import HfReader
from megatron_rl.config import Config
from megatron_rl.config.sections import ColumnsSection
from megatron_rl.engine.vllm_engine import VllmEngine
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.preflight.settings import check_evaluation
from megatron_rl.rollouts.grading import Grader
from megatron_rl.rollouts.prompt_sets import share_evaluation_sets
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import atomic_write_text
from megatron_rl.telemetry.console import Console
from megatron_rl.telemetry.metrics import PhaseClock
from megatron_rl.trainer.build_engines import (
    build_engine,
    build_verifiers,
    collective_timeout,
)
from megatron_rl.trainer.evaluation import (
    ConfidenceInterval,
    EngineAnswers,
    Evaluator,
    SetScores,
    describe_responses,
    intervals,
)
from megatron_rl.trainer.recorder import Recorder
from megatron_rl.trainer.startup import choose_verifier, fix_date, open_conversations

SCORES = "scores.json"


def run_evaluation(
    config: Config,
    files: Mapping[str, tuple[str, ColumnsSection]],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Evaluate `config.model.path` on `config.eval.sets`, as this rank of `world_size`.

    files: the sets, by the names that the user gave them.
    The folder `run.dir/run.name` receives `eval/`, every response of each set, and `scores.json`.
    Raises ValueError for bad input before any long work.
    """
    shape = check_evaluation(config, files, world_size=world_size)
    reader = HfReader(config.model.path, shape)
    reader.check(shape)
    directory = RunDirectory.of(config)
    if rank == 0:
        directory.evaluations.mkdir(parents=True)
    topology = groups.initialise(seed=config.seed, timeout=collective_timeout(config))
    console = Console(is_main_rank=rank == 0, log_file=directory.log_file)
    log = Console(is_main_rank=True, log_file=directory.log_file).log  # of every rank
    config = fix_date(config, directory, echo=console.echo)
    opened = open_conversations(config, topology, echo=log)
    with (
        opened as (shown, conversations),
        share_evaluation_sets(shown, shape, directory.prompts, echo=console.echo) as sets,
        build_verifiers(
            config := choose_verifier(
                config, directory, next(iter(sets.values())), echo=console.echo
            ),
            topology,
            directory,
        ) as pool,
    ):
        with console.progress("starting vLLM"):
            engine = build_engine(config, topology)
        engine.receive(_read_weights(reader, engine), version=0)
        console.echo(engine.describe_stop())
        clock = PhaseClock(topology.device)
        recorder = Recorder(config, directory if rank == 0 else None, None, console, clock)
        grader = Grader(pool, topology)
        given = EngineAnswers(config, engine, grader, sets, console, conversations)
        evaluator = Evaluator(config, given, sets, recorder, console)
        answers = {name: evaluator.answer(name, 0) for name in sets}
        given.check()
        recorder.wait()
    if rank == 0:
        scores = {name: evaluator.score(rollouts) for name, rollouts in answers.items()}
        responses = {name: describe_responses(rollouts) for name, rollouts in answers.items()}
        _report(scores, responses, config, directory, console)


@torch.no_grad()
def _read_weights(reader: HfReader, engine: VllmEngine) -> Iterator[tuple[str, Tensor]]:
    for name, size in tensor_shapes(engine.shape).items():
        values = reader.rectangle(name, slice(0, size[0]), slice(0, size[-1]))
        yield name, values.reshape(size).to(engine.dtype)


def _report(
    scores: Mapping[str, SetScores],
    responses: Mapping[str, Mapping[str, float]],
    config: Config,
    directory: RunDirectory,
    console: Console,
) -> None:
    """Print the table and write scores.json; responses: `describe_responses` of each set."""
    first = next(iter(scores.values()))
    found = {name: intervals(scores, name) for name in first.by_problem}
    problems = {name: len(one.by_problem[f"avg@{one.samples}"]) for name, one in scores.items()}
    console.echo(table(found, problems, responses))
    content = {
        "model": config.model.path,
        "seed": config.seed,
        "date": config.data.date,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "max_response_tokens": config.rollout.max_response_tokens,
        "sets": {name: str(Path(one.path).absolute()) for name, one in config.eval.sets.items()},
        "scores": {
            name: {one: None if value is None else vars(value) for one, value in by_set.items()}
            for name, by_set in found.items()
        },
        "responses": {name: dict(described) for name, described in responses.items()},
    }
    atomic_write_text(directory.path / SCORES, json.dumps(content, indent=1) + "\n")
    console.echo(f"  responses and {SCORES}: {directory.path}")


SHARES = {
    "time_limit_fraction": "time limit",
    "failed_fraction": "failed",
    "truncated_fraction": "truncated",
}


def table(
    found: Mapping[str, Mapping[str, ConfidenceInterval | None]],
    problems: Mapping[str, int],
    responses: Mapping[str, Mapping[str, float]],
) -> str:
    """Scores in percent with 95% intervals, a line for each set and one for macro.

    The last columns are the percentages of responses that hit the time limit, on which the verifier
    failed, and that were truncated; each counts with the reward that it got.
    """
    lines = [
        f"{'set':<16}{'problems':>9}"
        + "".join(f"{name:>22}" for name in found)
        + "".join(f"{title:>12}" for title in SHARES.values())
    ]
    for one in next(iter(found.values())):
        cells = [f"{_show(by_set[one]):>22}" for by_set in found.values()]
        if one in responses:
            cells += [f"{100 * responses[one][key]:>11.1f}%" for key in SHARES]
        lines.append(f"{one:<16}{problems.get(one, ''):>9}" + "".join(cells))
    return "\n".join(lines)


def _show(score: ConfidenceInterval | None) -> str:
    """Format a score with its interval in percent; a dash if there is none."""
    if score is None:
        return "-"
    return f"{100 * score.score:.1f}% [{100 * score.low:.1f}, {100 * score.high:.1f}]"
