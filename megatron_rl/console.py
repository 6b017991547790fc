"""What a person sees: progress bars on a terminal, flushed lines and a heartbeat elsewhere."""

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
    """Speaks for one rank of a run and keeps what it said in the run's log; others are silent.

    on_advance: called, also where it is silent, whenever what `progress` shows gets further.
    """

    def __init__(self, *, speaks: bool, log_file: Path | None = None) -> None:
        self.speaks = speaks
        self.log_file = log_file
        self.on_advance: Callable[[], object] = lambda: None
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """Print one line now, and append it to the log with the time."""
        if not self.speaks:
            return
        if self._rich.is_terminal:
            self._rich.print(text, markup=False)
        else:
            print(text, flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        """Append to the log only."""
        if self.speaks and self.log_file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with self.log_file.open("a") as log:
                log.writelines(f"{stamp} {line}\n" for line in text.splitlines() or [""])

    @contextmanager
    def progress(self, description: str) -> Iterator[Advance]:
        """A bar for one long part; yields `advance(done, total)`.

        Without a terminal: one line a minute at most, so that a log file stays readable.
        """
        self.on_advance()
        if not self.speaks:
            yield self._advance_in_silence
        elif self._rich.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(description, total=None)

                def advance(done: int, total: int) -> None:
                    self.on_advance()
                    bar.update(task, completed=done, total=total)

                yield advance
        else:
            yield self._heartbeat(description)

    def _advance_in_silence(self, done: int, total: int) -> None:
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
                self.say(f"  {description}: {done}/{total}")

        return advance
