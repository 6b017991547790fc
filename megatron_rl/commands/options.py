"""Options of subcommands as tables."""

import argparse
from collections.abc import Callable
from typing import Any

Commands = argparse._SubParsersAction  # argparse has no public name for it
Option = tuple[str, str, dict[str, Any]]


def option(name: str, text: str, **keywords: Any) -> Option:
    """Return an option or argument with its help text; without keywords it is a switch."""
    return name, text, keywords or {"action": "store_true"}


def overrides(example: str) -> Option:
    text = f"Settings that replace those of the config, for example {example}."
    return option("overrides", text, nargs="*", metavar="key=value")


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace, list[str]], int],
    *options: Option,
    help: str,
    description: str | None = None,
    sets_environment: bool = True,
) -> None:
    """Add a subcommand; sets_environment: `cli.main` prepares the environment variables first."""
    parser = commands.add_parser(name, help=help, description=description)
    for flag, text, keywords in options:
        parser.add_argument(*flag.split(), help=text, **keywords)
    parser.set_defaults(run=run, sets_environment=sets_environment)


def count(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)
