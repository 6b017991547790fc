"""Rows of the table: measured values, bounds and the result."""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16


class Skipped(Exception):  # noqa: N818 - not an error
    """Check that this machine cannot run; the message names the missing requirement."""


@dataclass
class Row:
    """Measurements of one check, in order. Every check is a function of its row."""

    name: str
    status: str = "ok"
    seconds: float = 0.0
    peak_gib: float = 0.0  # allocated on the device
    measures: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""  # why it failed or was skipped

    def note(self, what: str, value: Any) -> None:
        """Record a value without a bound."""
        self.measures.append({"what": what, "value": value})

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Record a value; raise AssertionError if it is above the bound or NaN."""
        self.measures.append({"what": what, "value": value, "at_most": bound})
        if not value <= bound:
            raise AssertionError(f"{what} is {value:.3g}, above {bound:g}")

    def at_least(self, what: str, value: float, bound: float) -> None:
        """Record a value; raise AssertionError if it is below the bound or NaN."""
        self.measures.append({"what": what, "value": value, "at_least": bound})
        if not value >= bound:
            raise AssertionError(f"{what} is {value:.3g}, below {bound:g}")

    def line(self) -> str:
        """Format the row for printing."""
        output = [_format(one) for one in self.measures] + [self.detail] * bool(self.detail)
        return f"{self.name:<19} {self.status:<8} {self.seconds:>6.1f}  {'; '.join(output)}"


def _format(measure: dict[str, Any]) -> str:
    value = measure["value"]
    output = f"{measure['what']} {value:.3g}" if isinstance(value, float) else (
        f"{measure['what']} {value}"
    )  # fmt: skip
    for kind, sign in (("at_most", "<="), ("at_least", ">=")):
        if kind in measure:
            output += f" ({sign} {measure[kind]:g})"
    return output


def run_row(name: str, check: Callable[[Row], None]) -> Row:
    """Run one check; an exception is its result."""
    row = Row(name)
    gc.collect()  # free the previous row's actor, which contains reference cycles
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    try:
        check(row)
    except Skipped as reason:
        row.status, row.detail = "skipped", str(reason)
    except Exception as error:  # noqa: BLE001 - a failing check is a row; the others still run
        row.status, row.detail = "FAILED", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    row.seconds = time.monotonic() - start
    if DEVICE == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    return row


def timed(act, *arguments):
    """Return the seconds of a call, including the work of the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    act(*arguments)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
