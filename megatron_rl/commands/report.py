"""`megatron-rl report`: write a self-contained HTML page about runs."""

import argparse

from megatron_rl.commands.options import Commands, add_command, option


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
        help="Write one HTML page about runs, with figures.",
        description="Write report.html, one file that works without a network, and PNG figures: "
        "best scores, curves over seeds, time to a reward, log-ratios by position, tokens rejected "
        "by the gate, time per phase, and recorded responses token by token.",
        sets_environment=False,
    )  # fmt: skip


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
