"""`megatron-rl report`: a page about runs, to be read anywhere."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Its options."""
    report = commands.add_parser(
        "report",
        help="one page about runs, with pictures",
        description="Write report.html, one file that needs no network, and PNGs: best scores, "
        "curves over seeds, time to a reward, log-ratios by position, what the gate did, where the "
        "time went, and the traced responses token by token.",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN_OR_STUDY", help="run directories, or folders that hold some"
    )
    report.add_argument(
        "--output",
        metavar="FOLDER",
        help="where to write; by default into the folder that is given",
    )
    report.add_argument(
        "--threshold", type=float, metavar="REWARD",
        help="the mean reward whose time is told; by default the highest multiple of 0.05 that "
        "nine runs of ten reach",
    )  # fmt: skip
    report.add_argument(
        "--megabytes", type=float, default=4.0, metavar="N",
        help="what traced responses may add to the page; 0: none of them (default: %(default)s)",
    )  # fmt: skip
    report.add_argument(
        "--bundle", action="store_true",
        help="also report.zip: all of it, with the metrics and the config of every run",
    )  # fmt: skip
    report.set_defaults(run=run, sets_environment=False)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Write the page, and say where."""
    from megatron_rl.report.build import write_report

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
