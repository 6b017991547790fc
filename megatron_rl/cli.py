"""The command `megatron-rl`."""

import argparse
import sys

from megatron_rl import __version__
from megatron_rl.commands import convert, doctor, launch, train
from megatron_rl.processes import prepare_environment


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits non-zero with one clear message when something is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if getattr(options, "sets_environment", True):  # what is set here would reach a launched job
        prepare_environment()
    sys.exit(options.run(options, arguments))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron-rl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (train, launch, convert, doctor):
        command.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    for word in rest:  # overrides may stand before and after options
        if word.startswith("-") or "=" not in word or "overrides" not in options:
            parser.error(f"unknown argument {word!r}; settings are given as key=value")
        options.overrides.append(word)
    return options


if __name__ == "__main__":
    main()
