"""The command `megatron-rl`."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits non-zero with one clear message when something is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with _ended_by_ctrl_c():
        options = _parse(arguments)
        if getattr(options, "sets_environment", True):  # or it would reach a launched job
            from megatron_rl.processes import prepare_environment

            prepare_environment()
        try:
            status = options.run(options, arguments)
        except Exception as error:  # noqa: BLE001 - said, or raised again
            from megatron_rl.commands.ending import fail

            status = fail(error, None)
        sys.exit(status)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Until a command listens itself, Ctrl-C ends it without a traceback: nothing has begun."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"megatron-rl: ended before anything began\n")
        os._exit(128 + number)

    earlier = signal.getsignal(signal.SIGINT)
    if earlier is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _parse(arguments: list[str]) -> argparse.Namespace:
    # Here, since they take a moment that Ctrl-C may fall into.
    from megatron_rl import __version__
    from megatron_rl.commands import (
        convert,
        doctor,
        evaluate,
        launch,
        plan,
        rehearse,
        report,
        study,
        task,
        train,
    )

    parser = argparse.ArgumentParser(prog="megatron-rl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (
        train,
        evaluate,
        launch,
        plan,
        rehearse,
        study,
        task,
        convert,
        report,
        doctor,
    ):
        command.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    for word in rest:  # overrides may stand before and after options
        if word.startswith("-") or "=" not in word or "overrides" not in options:
            # Not by `error`, which would show the usage of all commands.
            parser.exit(2, f"megatron-rl: error: unknown argument {word!r}{_meant(word)}\n")
        options.overrides.append(word)
    return options


def _meant(word: str) -> str:
    """The setting that an option of this name would be."""
    from megatron_rl.config import valid_keys

    name, _, value = word.lstrip("-").partition("=")
    for key in valid_keys():
        if name in (key, key.rpartition(".")[2]):
            return f"; settings are given as {key}={value or 'VALUE'}"
    return "; settings are given as key=value, as trainer.steps=5"


if __name__ == "__main__":
    main()
