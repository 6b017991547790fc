"""Options of subcommands as tables."""

import argparse
import math
import os
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


def named(name: str, text: str, **keywords: Any) -> Option:
    """Return an option whose value may also be given without its name, before the settings."""
    return option(name, f"{text} May be given without {name}.", **keywords, named=True)


class _Once(argparse.Action):
    """Store the value of an option; refuse a second one, which would replace the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        seen = namespace.__dict__.setdefault("seen", {})
        if option_string and self.dest in seen:
            raise argparse.ArgumentError(
                self, f"given twice, as {seen[self.dest]} and as {values}; give it once"
            )
        seen[self.dest] = values
        setattr(namespace, self.dest, values)


def resolve_named(options: argparse.Namespace) -> str | None:
    """Move the value of a `named` option from the settings; returns what is wrong, or None."""
    if not (name := getattr(options, "named", None)):
        return None
    key, words = name.lstrip("-"), options.overrides
    plain = [word for word in words if "=" not in word]
    if getattr(options, key) is None:
        value = plain.pop(0) if plain else (words or [""])[0]
        if "=" in value and not os.path.exists(value):
            value = ""  # a setting, and not a path with = in it
        if not value:
            return f"the following argument is required: {options.metavar} (or {name})"
        setattr(options, key, value)
        words.remove(value)
    for word in plain:  # other words are settings without a value
        if os.path.exists(word) or word.endswith((".yaml", ".yml")):
            first = getattr(options, key)
            return f"{name} is given twice, as {first} and as {word}; give it once"
    return None


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
        given = dict(keywords)
        if given.pop("named", False):
            parser.set_defaults(named=flag, metavar=given["metavar"])
        if flag.startswith("-"):
            given.setdefault("action", _Once)
        parser.add_argument(*flag.split(), help=text, **given)
    parser.set_defaults(run=run, sets_environment=sets_environment)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def count(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)
