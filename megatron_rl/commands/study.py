"""`megatron-rl study`: run a grid of runs, one after another or side by side, and table them."""

import argparse
import sys
from functools import partial
from typing import Any

from megatron_rl.config import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    study = commands.add_parser(
        "study",
        help="run a grid of runs from one file; the same command goes on after a kill",
        description="Run every run of a study that is not done, and keep results.parquet and "
        "summary.md in its folder. Start it again after whatever ended it: what is done is "
        "skipped, what had begun goes on from its last checkpoint.",
    )
    study.add_argument("file", metavar="FILE", help="YAML, as examples/pnpo/study_reuse.yaml")
    study.add_argument("--cluster", metavar="FILE", help="launch the runs there, by NeMo-Run")
    study.add_argument("--status", action="store_true", help="only tell and table what there is")
    study.add_argument("--compare", metavar="AXIS", help="of the summary; default: the last axis")
    study.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    study.set_defaults(run=run)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run or table the study; 75 where it was asked to end and can go on."""
    from megatron_rl.study.plan import load_study
    from megatron_rl.study.running import Start, StartedOnCluster, opened, run_study, start_here

    study = load_study(options.file, options.overrides)
    axis = options.compare or list(study.file.axes)[-1]
    if axis not in study.file.axes:
        raise ConfigError(f"--compare {axis}: the study has {', '.join(study.file.axes)}")
    if options.status:
        text, states = _write(study, axis)
        begun = [f"{one.run.name} (step {one.step})" for one in states if one.state == "begun"]
        done = sum(one.state == "done" for one in states)
        _say(
            f"{study.file.name}: {done} of {len(states)} done; begun: {', '.join(begun) or 'none'}"
        )
        print(text, end="")
        return 0
    with opened(study):
        start: Start = start_here
        python = sys.executable
        if options.cluster:
            start = partial(StartedOnCluster, cluster_file=options.cluster)
            python = _training_python(options.cluster)
        status = run_study(
            study, start=start, say=_say, on_end=lambda: _write(study, axis), python=python
        )
        print(_write(study, axis)[0], end="")
        return status


def _training_python(cluster_file: str) -> str:
    """The launcher's own has no torch."""
    from megatron_rl.launch.cluster import load_cluster
    from megatron_rl.launch.plan import default_python

    return load_cluster(cluster_file).python or default_python()


def _say(text: str) -> None:
    print(text, flush=True)


def _write(study: Any, axis: str) -> tuple[str, list[Any]]:
    from megatron_rl.runs.files import write_atomically
    from megatron_rl.study.results import write_results
    from megatron_rl.study.summary import find_outcome, summarise

    states = write_results(study)
    outcomes = [found for state in states if (found := find_outcome(state))]
    text = summarise(outcomes, axis, first=str(next(iter(study.file.axes[axis]))))
    if study.folder.is_dir():
        write_atomically(study.folder / "summary.md", text)
    return text, states
