"""Evaluating a model that is not being trained: the engine, judges and scores of training."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.actor import groups
from megatron_rl.actor.weights import HfReader
from megatron_rl.config import Config
from megatron_rl.config.data_sections import ColumnsSection
from megatron_rl.console import Console
from megatron_rl.evaluation.scores import Interval, SetScores, intervals
from megatron_rl.models.shape import tensor_shapes
from megatron_rl.preflight.settings import check_evaluation
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.runs.directory import RunDirectory
from megatron_rl.runs.files import write_atomically
from megatron_rl.trainer.build import build_engine, build_verifiers, collective_timeout
from megatron_rl.trainer.evaluation import Evaluator
from megatron_rl.trainer.judge import Judge
from megatron_rl.trainer.metrics import PhaseClock
from megatron_rl.trainer.prompt_sets import share_evaluation_sets
from megatron_rl.trainer.recorder import Recorder

SCORES = "scores.json"


def run_evaluation(
    config: Config,
    files: Mapping[str, tuple[str, ColumnsSection]],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Evaluate `config.model.path` on `config.eval.sets`, as this rank of `world_size`.

    files: the sets, by what the user calls them.
    The folder `run.dir/run.name` receives `eval/`, every response of each set, and `scores.json`.
    Raises ValueError for bad input before any long work.
    """
    shape = check_evaluation(config, files, world_size=world_size)
    reader = HfReader(config.model.path)
    reader.check(shape)
    directory = RunDirectory.of(config)
    if rank == 0:
        directory.evaluations.mkdir(parents=True)
    topology = groups.initialise(seed=config.seed, timeout=collective_timeout(config))
    console = Console(speaks=rank == 0, log_file=directory.log_file)
    sets = share_evaluation_sets(config, shape, say=console.say)
    with build_verifiers(config, topology, directory) as pool:
        with console.progress("starting vLLM"):
            engine = build_engine(config, topology)
        engine.receive(_read_weights(reader, engine), version=0)
        console.say(engine.describe_stop())
        clock = PhaseClock(topology.device)
        recorder = Recorder(config, directory if rank == 0 else None, None, console, clock)
        judge = Judge(pool, topology)
        evaluator = Evaluator(config, engine, judge, sets, recorder, console)
        scores = {name: evaluator.score(evaluator.answer(name, 0)) for name in sets}
        recorder.wait()
    if rank == 0:
        _tell(scores, config, directory, console)


@torch.no_grad()
def _read_weights(reader: HfReader, engine: VllmEngine) -> Iterator[tuple[str, Tensor]]:
    for name in tensor_shapes(engine.shape):
        yield name, reader.slice(name)[:].to(engine.dtype)


def _tell(
    scores: dict[str, SetScores], config: Config, directory: RunDirectory, console: Console
) -> None:
    """Print the table and write scores.json."""
    first = next(iter(scores.values()))
    found = {name: intervals(scores, name) for name in first.by_problem}
    console.say(table(found, {name: len(one.by_problem[f"avg@{one.samples}"])
                              for name, one in scores.items()}))  # fmt: skip
    content = {
        "model": config.model.path,
        "seed": config.seed,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "max_response_tokens": config.rollout.max_response_tokens,
        "sets": {name: str(Path(one.path).absolute()) for name, one in config.eval.sets.items()},
        "scores": {
            name: {one: vars(interval) for one, interval in by_set.items()}
            for name, by_set in found.items()
        },
    }
    write_atomically(directory.path / SCORES, json.dumps(content, indent=1) + "\n")
    console.say(f"  responses and {SCORES}: {directory.path}")


def table(found: dict[str, dict[str, Interval]], problems: dict[str, int]) -> str:
    """Scores in percent with 95% intervals, a line for each set and one for macro."""
    lines = [f"{'set':<16}{'problems':>9}" + "".join(f"{name:>22}" for name in found)]
    for one in next(iter(found.values())):
        cells = (f"{100 * i.score:.1f} [{100 * i.low:.1f}, {100 * i.high:.1f}]"
                 for i in (by_set[one] for by_set in found.values()))  # fmt: skip
        lines.append(f"{one:<16}{problems.get(one, ''):>9}" + "".join(f"{c:>22}" for c in cells))
    return "\n".join(lines)
