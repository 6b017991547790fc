"""`megatron-rl report`: write a self-contained HTML page about runs."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `report` subcommand."""
    report = commands.add_parser(
        "report",
        help="Write one HTML page about runs, with figures.",
        description="Write report.html, one file that works without a network, and PNG figures: "
        "best scores, curves over seeds, time to a reward, log-ratios by position, tokens rejected "
        "by the gate, time per phase, and recorded responses token by token.",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN_OR_STUDY",
        help="Run directories, or folders that contain run directories.",
    )  # fmt: skip
    report.add_argument(
        "--output",
        metavar="FOLDER",
        help="Folder to write. Default: the given folder; required if several are given.",
    )
    report.add_argument(
        "--threshold", type=float, metavar="REWARD",
        help="Mean reward for the time-to-reward figure. Default: the highest multiple of 0.05 "
        "(0.005 for smaller rewards, and so on) that nine of ten runs reach.",
    )  # fmt: skip
    report.add_argument(
        "--megabytes", type=float, default=4.0, metavar="N",
        help="Maximum size in MB that recorded responses add to the page; 0 leaves them out. "
        "Default: %(default)s.",
    )  # fmt: skip
    report.add_argument(
        "--bundle", action="store_true",
        help="Also write report.zip with the page, the figures, and every run's metrics and "
        "config.",
    )  # fmt: skip
    report.set_defaults(run=run, sets_environment=False)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Write the page, and print the paths of the written files."""
    from megatron_rl.apps.report.build import write_report

    written = write_report(
        options.runs,
        output=options.output,
        threshold=options.threshold,
        megabytes=options.megabytes,
        bundle=options.bundle,
    )
    for path in written:
        print(path)
    return 0
