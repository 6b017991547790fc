"""Run a grid of experiments, and tabulate their results: python -m research.study FILE."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.commands.ending import fail
from megatron_rl.config import ConfigError
from megatron_rl.runtime.processes import prepare_environment


def main(arguments: list[str] | None = None) -> None:
    """Run every unfinished run of a study, and update results.parquet and summary.md.

    If the command is interrupted, start it again: finished runs are skipped, and started runs
    continue from their last checkpoint.
    """
    parser = argparse.ArgumentParser(prog="research.study", description=main.__doc__)
    parser.add_argument("file", metavar="FILE", help="YAML file of the study.")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="YAML file of a cluster on which to launch the runs with NeMo-Run. Default: run them "
        "on this machine.",
    )
    parser.add_argument(
        "--status", action="store_true", help="Print the state and results without running."
    )
    parser.add_argument(
        "--store", metavar="FILE", help="Add the finished runs to a Parquet file, without running."
    )
    parser.add_argument(
        "--restore",
        metavar="FILE",
        help="Write the runs of such a file as finished ones, which are then skipped.",
    )
    parser.add_argument(
        "--compare", metavar="AXIS", help="Axis that the summary compares. Default: the last axis."
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Settings that apply to every run."
    )
    options = parser.parse_intermixed_args(arguments)
    prepare_environment()
    try:
        status = run(options)
    except Exception as error:  # noqa: BLE001 - reported, or raised again
        status = fail(error, None)
    sys.exit(status)


def run(options: argparse.Namespace) -> int:
    """Run or summarize the study; returns 75 if it was interrupted and can be resumed."""
    from research.study.running import (
        Start,
        StartedOnCluster,
        opened,
        run_study,
        start_here,
    )
    from research.study.study_plan import load_study

    study = load_study(options.file, options.overrides)
    axis = options.compare or list(study.file.axes)[-1]
    if axis not in study.file.axes:
        raise ConfigError(f"--compare {axis}: the study has {', '.join(study.file.axes)}")
    if options.store or options.restore:
        from research.study.results import write_results
        from research.study.storing import restore_runs, store_runs

        if options.restore:
            _echo(restore_runs(study, Path(options.restore)))
        if options.store:
            write_results(study)
            _echo(store_runs(study, Path(options.store)))
        return 0
    if options.status:
        text, states = _write(study, axis)
        begun = [f"{it.run.name} (step {it.step})" for it in states if it.state == "begun"]
        done = sum(state.state == "done" for state in states)
        _echo(
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
            study, start=start, echo=_echo, on_end=lambda: _write(study, axis), python=python
        )
        print(_write(study, axis)[0], end="")
        return status


def _training_python(cluster_file: str) -> str:
    """Return the cluster's Python; the launcher's environment has no torch."""
    from megatron_rl.apps.launch.cluster import load_cluster
    from megatron_rl.apps.launch.launch_plan import default_python

    return load_cluster(cluster_file).python or default_python()


def _echo(text: str) -> None:
    print(text, flush=True)


def _write(study: Any, axis: str) -> tuple[str, list[Any]]:
    from megatron_rl.runs.files import atomic_write_text
    from research.study.contrasts import ContrastTables
    from research.study.results import write_results
    from research.study.summary import find_outcome, summarise

    states = write_results(study)
    outcomes = [outcome for state in states if (outcome := find_outcome(state))]
    text = summarise(outcomes, axis, first=str(next(iter(study.file.axes[axis]))))
    if study.contrasts is not None:
        text += "\n" + ContrastTables(study.contrasts, outcomes).render()
    done, settings = sum(state.state == "done" for state in states), " ".join(study.overrides)
    text += f"\nPlan: SHA-256 {study.digest} of the study file"
    text += f", with {settings}" if settings else ""
    text += f"; {done} of {len(states)} runs are done.\n"
    if study.folder.is_dir():
        atomic_write_text(study.folder / "summary.md", text)
    return text, states


if __name__ == "__main__":
    main()
