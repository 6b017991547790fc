"""Console output: progress bars on a terminal, otherwise flushed lines and a periodic status."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HEARTBEAT_SECONDS = 60.0

Advance = Callable[[int, int], None]  # (done, total)


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
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)

    def echo(self, text: str = "") -> None:
        """Print one line immediately, and append it to the log with a timestamp."""
        if not self.is_main_rank:
            return
        if self._rich.is_terminal:
            self._rich.print(text, markup=False)
        else:
            print(text, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Append text to the log without printing it."""
        if self.is_main_rank and self.log_file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with self.log_file.open("a", encoding="utf-8") as log:
                log.writelines(f"{stamp} {line}\n" for line in text.splitlines() or [""])

    @contextmanager
    def progress(self, description: str) -> Iterator[Advance]:
        """Show progress of a long phase; yields `advance(done, total)`.

        Without a terminal at most one line a minute is printed, so that log files stay readable.
        """
        self.on_advance()
        if not self.is_main_rank:
            yield self._advance_silently
        elif self._rich.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(description, total=None)

                def advance(done: int, total: int) -> None:
                    self.on_advance()
                    bar.update(task, completed=done, total=total)

                yield advance
        else:
            yield self._heartbeat(description)

    def _advance_silently(self, done: int, total: int) -> None:
        self.on_advance()

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("  {task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
        )

    def _heartbeat(self, description: str) -> Advance:
        last = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal last
            self.on_advance()
            if time.monotonic() - last > HEARTBEAT_SECONDS:
                last = time.monotonic()
                self.echo(f"  {description}: {done}/{total}")

        return advance
