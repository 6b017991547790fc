"""A thread for each logger, so that one that raises or blocks never ends or delays a run.

The rows that a logger did not take are in metrics.jsonl, and are sent again when it works, at the
end, or by a resumed run.
"""

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.runs.rows import read_rows
from megatron_rl.runtime.failures import is_full_disk
from megatron_rl.telemetry.loggers import Logger, Sample

RETRY_SECONDS = 30.0  # between attempts of a logger that failed
BLOCKED_SECONDS = 120.0  # in one call of a logger, before a warning
CLOSE_SECONDS = 60.0  # to send what is left at the end of a run


class LoggerThread:
    """Sends rows to one logger in a thread, so that it can neither end nor delay a run.

    metrics: the run's metrics.jsonl. echo: receives a warning at the first failure, and a line when
    the missing rows are sent. The last step that was sent is stored while later ones are missing,
    so that a resumed run sends them.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Logger],
        *,
        metrics: Path,
        echo: Callable[[str], object],
    ) -> None:
        self._name, self._metrics, self._echo = name, metrics, echo
        self._behind_file = metrics.with_name(f"{re.sub(r'[^a-z]', '', name.lower())}_is_behind")
        self._rows: queue.SimpleQueue[tuple[dict[str, Any], Sample] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._logger: Logger | None = None
        self._is_started = self._is_behind = self._has_warned = False
        self._sent = self._sent_from_file = -1  # the last such step
        self._call_began = self._retry_at = 0.0  # 0: no call in progress; try now
        try:  # here: imports in two threads at once can block each other
            self._logger = build()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
            self._warn(f"cannot be used ({_describe(error)}): training continues without it")

    def open(self, *, first_step: int) -> None:
        """Start the thread; rows from `first_step` on replace older ones."""
        self._sent = first_step - 1
        if first_step == 0:
            self._behind_file.unlink(missing_ok=True)
        elif self._behind_file.is_file():  # the last start of the run left rows out
            text = self._behind_file.read_text(encoding="utf-8")  # empty if the disk was full
            self._sent = min(int(text), self._sent) if text else -1
            self._is_behind = True
        if self._logger is not None:
            self._thread.start()
        else:  # a resumed run, in which it can be used, sends the rows
            self._mark_behind()

    def append(self, row: dict[str, Any], sample: Sample) -> None:
        """Queue a row that metrics.jsonl already contains; never blocks."""
        self._rows.put((row, sample))
        began = self._call_began
        if began and time.monotonic() - began > BLOCKED_SECONDS:
            self._warn(f"has not answered for {BLOCKED_SECONDS:.0f} s: training continues, and the "
                       "rows are sent when it answers")  # fmt: skip

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left and close the logger, for at most so many seconds."""
        if not self._thread.is_alive():
            return
        self._rows.put(None)
        self._thread.join(seconds)
        is_blocked = self._thread.is_alive()
        if is_blocked and (rows := self._missing_rows()):
            self._mark_behind()
        else:
            rows = self._missing_rows() if self._is_behind else []
        if rows:
            what = f"has not answered for {seconds:g} s" if is_blocked else "still fails"
            self._echo(
                f"warning: {self._name} {what}: {len(rows)} steps from {rows[0]['step']} on are "
                f"missing there; {self._metrics.name} contains them, and a resumed run sends them"
            )

    def _serve(self) -> None:
        while (item := self._rows.get()) is not None:
            row, sample = item
            if row["step"] > self._sent_from_file and time.monotonic() >= self._retry_at:
                self._send(row, sample)
        if self._is_behind:
            self._send(None, None)
        with self._call():
            if self._is_started and self._logger is not None:
                self._logger.close()

    def _send(self, row: dict[str, Any] | None, sample: Sample) -> None:
        """Send a row, or all that are missing."""
        with self._call():
            assert self._logger is not None
            rows = self._missing_rows() if self._is_behind or row is None else [row]
            if not self._is_started:
                self._logger.start(self._sent + 1)
                self._is_started = True
            for one in rows:
                self._call_began = time.monotonic()
                step, is_given = int(one["step"]), row is not None and one["step"] == row["step"]
                numbers = {k: v for k, v in one.items() if v is not None and k != "step"}
                self._logger.log(step, numbers, sample if is_given else None)
                self._sent = step
            if self._is_behind:
                self._is_behind, self._sent_from_file = False, self._sent
                self._behind_file.unlink(missing_ok=True)
                self._echo(f"{self._name} has received the {len(rows)} steps that were missing")

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Warn if the enclosed calls of the logger fail; the next attempt starts it again."""
        self._call_began = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
            self._is_started, self._retry_at = False, time.monotonic() + RETRY_SECONDS
            self._mark_behind()
            if not is_full_disk(error):  # which ends the run with a message of its own
                self._warn(f"failed ({_describe(error)}): training continues; the rows are in "
                           f"{self._metrics.name} and are sent when it works again")  # fmt: skip
        finally:
            self._call_began = 0.0

    def _mark_behind(self) -> None:
        self._is_behind = True
        with contextlib.suppress(OSError):  # the disk may be full
            self._behind_file.write_text(f"{self._sent}", encoding="utf-8")

    def _missing_rows(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self._metrics) if row["step"] > self._sent]

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._echo(f"warning: {self._name} {text}")


def _describe(error: BaseException) -> str:
    """Return the type and the first line of an error, shortened."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
