"""`megatron-rl report`: write a self-contained HTML page about runs."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_rl.commands.options import Commands, add_command, option
from megatron_rl.config import ConfigError


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "report", run,
        option("runs", "Run directories, or folders that contain run directories.",
               nargs="+", metavar="RUN_OR_STUDY"),
        option("--output", "Folder to write. Default: the given folder; required if several are "
               "given.", metavar="FOLDER"),
        option("--threshold", "Mean reward for the time-to-reward figure. Default: the highest "
               "multiple of 0.05 (0.005 for smaller rewards, and so on) that nine of ten runs "
               "reach.", type=float, metavar="REWARD"),
        option("--megabytes", "Maximum size in MB that recorded responses add to the page; 0 "
               "leaves them out. Default: %(default)s.", type=float, default=4.0, metavar="N"),
        option("--bundle", "Also write report.zip with the page, the figures, and every run's "
               "metrics and config."),
        option("--watch", "Write the page again every N seconds until the runs are finished, or "
               "until Ctrl-C; browsers reload it. N without a number: 30.", type=float,
               metavar="N", nargs="?", const=30.0),
        help="Write one HTML page about runs, with figures.",
        description="Write report.html, one file that works without a network, and PNG figures: "
        "best scores, curves over seeds, time to a reward, log-ratios by position, tokens rejected "
        "by the gate, time per phase, and recorded responses token by token.",
        sets_environment=False,
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Write the page, and print the paths of the written files."""
    from megatron_rl.apps.report.build import write_report

    write = partial(
        write_report,
        options.runs,
        output=options.output,
        threshold=options.threshold,
        megabytes=options.megabytes,
    )
    if options.watch is not None:
        _watch(write, options.runs, seconds=options.watch)
    written = write(bundle=options.bundle)
    for path in written:
        print(path)
    return 0


def _watch(write: Callable[..., list[Path]], runs: Sequence[str], *, seconds: float) -> None:
    """Write the page every `seconds` until the runs are finished, or until Ctrl-C."""
    from megatron_rl.apps.report.build import is_finished
    from megatron_rl.apps.report.runs import find_runs

    if not seconds >= 1:
        raise ConfigError(f"--watch {seconds:g}: give seconds, 1 or more")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_reported = False
    with contextlib.suppress(KeyboardInterrupt):
        while not all(map(is_finished, find_runs(runs))):
            (page,) = write(reload=seconds)
            if not has_reported:
                line = f"{page} is written every {seconds:g} s until the runs are finished"
                print(f"megatron-rl: {line}; Ctrl-C ends it", file=sys.stderr, flush=True)
                has_reported = True
            time.sleep(seconds)
