"""The command `megatron-rl`."""

import argparse
import contextlib
import importlib
import io
import locale
import os
import select
import signal
import sys
from collections.abc import Iterator

# modules of `commands`, in the order of the help page
COMMANDS = ("quickstart", "train", "evaluate", "launch", "plan", "dry_run", "export",
            "report", "rollouts", "doctor")  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the subcommand named by the arguments, and exit with its status."""
    if arguments is None:
        _use_utf8()
        arguments = sys.argv[1:]
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal that is not UTF-8 shows \u2192 for an arrow
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _exit_on_ctrl_c():
        options = _parse(arguments)
        if getattr(options, "sets_environment", True):  # launched jobs would inherit it
            from megatron_rl.runtime.processes import prepare_environment

            prepare_environment()
        try:
            status = options.run(options, arguments)
            sys.stdout.flush()
        except Exception as error:  # noqa: BLE001 - reported, or raised again
            if isinstance(error, BrokenPipeError) and _reader_is_gone():
                os._exit(128 + signal.SIGPIPE)  # silently, as other programs in front of `head`
            from megatron_rl.commands.ending import fail

            status = fail(error, None)
        sys.exit(status)


def _reader_is_gone() -> bool:
    """Return True if standard output is a pipe whose reader has exited."""
    poll = select.poll()
    poll.register(1, 0)  # errors are reported without asking
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding.

    Libraries read their own files in the locale's encoding. Only the terminal keeps it.
    """
    if locale.getpreferredencoding(False).upper() != "UTF-8":
        os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


@contextlib.contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    """Exit without a traceback on Ctrl-C, until the subcommand installs its own handler."""

    def interrupt(number: int, frame: object) -> None:
        os.write(2, b"megatron-rl: interrupted before the command started\n")
        os._exit(128 + number)

    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # SIGINT may be ignored, as under nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, previous)


def _parse(arguments: list[str]) -> argparse.Namespace:
    # Imported here, so that Ctrl-C during these imports is handled too.
    from megatron_rl import __version__
    from megatron_rl.commands.options import resolve_named
    from megatron_rl.config.other_trainers import answer_command

    parser = argparse.ArgumentParser(prog="megatron-rl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"megatron-rl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"megatron_rl.commands.{name}").add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    for word in rest:  # overrides may come before and after options
        is_named = "=" not in word and not hasattr(options, "named")
        if word.startswith("-") or is_named or "overrides" not in options:
            # `parser.error` would also print the usage of all commands.
            lines = answer_command(arguments[1:]) if "overrides" in options else []
            # One line for one option, lines for a pasted command.
            text = "".join(f"\n  {line}" for line in lines) if len(lines) > 1 else ""
            text = text or "".join(f"; {line}" for line in lines) or _suggestion(word)
            parser.exit(2, f"megatron-rl: error: unknown argument {word!r}{text}\n")
        options.overrides.append(word)
    if (problem := resolve_named(options)) is not None:
        answers = "".join(f"\n  {line}" for line in answer_command(options.overrides))
        parser.exit(2, f"megatron-rl: error: {problem}{answers}\n")
    return options


def _suggestion(word: str) -> str:
    """Return a hint that names the setting which the user probably meant."""
    from megatron_rl.config import valid_keys

    name, _, value = word.lstrip("-").partition("=")
    for key in valid_keys():
        if name in (key, key.rpartition(".")[2]):
            return f"; settings are given as {key}={value or 'VALUE'}"
    return "; settings are given as key=value, for example trainer.steps=5"


if __name__ == "__main__":
    main()
