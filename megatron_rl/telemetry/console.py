"""Console output: progress bars on a terminal, otherwise flushed lines and a periodic status."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Without a terminal: seconds between lines of one phase, later a fraction of what it has taken.
FIRST_LINES, LAST_LINES, FRACTION = 10.0, 60.0, 0.25


class Advance(Protocol):
    """Report progress of a phase."""

    def __call__(self, done: int, total: int, tokens: int = 0, expected: int = 0) -> None:
        """Report finished and total units, and generated and expected tokens."""


class _Output:
    """Standard output, whose loss (a pipe without a reader, a closed terminal) does not end a run.

    on_loss: receives one line.
    """

    def __init__(self, on_loss: Callable[[str], object]) -> None:
        self._on_loss = on_loss

    def write(self, text: str) -> int:
        with self._outliving():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with self._outliving():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    @contextmanager
    def _outliving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # In its place, also for what libraries print and for what is still in the buffer.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            self._on_loss(f"warning: nothing more can be printed ({error}); this log goes on")


class Console:
    """Prints and logs the output of the main rank; on other ranks all output is dropped.

    on_advance: called on every rank whenever `progress` advances.
    """

    def __init__(
        self,
        *,
        is_main_rank: bool,
        log_file: Path | None = None,
        on_advance: Callable[[], object] = lambda: None,
    ) -> None:
        self.is_main_rank = is_main_rank
        self.log_file = log_file
        self.on_advance = on_advance
        self._output = cast("IO[str]", _Output(on_loss=self.log))
        self._rich = RichConsole(file=self._output, highlight=False, soft_wrap=True)

    def echo(self, text: str = "") -> None:
        """Print one line immediately, and append it to the log with a timestamp."""
        if not self.is_main_rank:
            return
        if self._rich.is_terminal:
            self._rich.print(text, markup=False)
        else:
            print(text, file=self._output, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Append text to the log without printing it."""
        if self.is_main_rank and self.log_file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with self.log_file.open("a", encoding="utf-8") as log:
                log.writelines(f"{stamp} {line}\n" for line in text.splitlines() or [""])

    @contextmanager
    def progress(self, description: str) -> Iterator[Advance]:
        """Show progress of a long phase; yields `advance(done, total, tokens)`.

        Without a terminal a line is printed every ten seconds, in long phases once a minute, so
        that log files stay readable.
        """
        self.on_advance()
        if not self.is_main_rank:
            yield self._advance_silently
        elif self._rich.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(description, total=None, tokens="")

                def advance(done: int, total: int, tokens: int = 0, expected: int = 0) -> None:
                    self.on_advance()
                    bar.update(task, completed=done, total=total, tokens=_tokens(tokens))

                yield advance
        else:
            yield self._heartbeat(description)

    def _advance_silently(self, done: int, total: int, tokens: int = 0, expected: int = 0) -> None:
        self.on_advance()

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("  {task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
        )

    def _heartbeat(self, description: str) -> Advance:
        start = last = time.monotonic()

        def advance(done: int, total: int, tokens: int = 0, expected: int = 0) -> None:
            nonlocal last
            self.on_advance()
            now = time.monotonic()
            if now - last > min(LAST_LINES, max(FIRST_LINES, FRACTION * (now - start))):
                last = now
                fraction = tokens / expected if expected else done / total
                left = (now - start) * (1 / fraction - 1) if 0 < fraction < 1 else 0
                ending = f", about {left:.0f} s left" if left else ""
                self.echo(f"  {description}: {done}/{total}{_tokens(tokens)}{ending}")

        return advance


def _tokens(tokens: int) -> str:
    return f", {tokens:,} tokens" if tokens else ""
