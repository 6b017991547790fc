"""One row of the table: what was measured, against which bound, and the verdict."""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16


class Skipped(Exception):  # noqa: N818 - nothing is wrong
    """This machine cannot answer; the message says what it lacks."""


@dataclass
class Row:
    """Measures of one check, in their order. Every check is a function of its row."""

    name: str
    status: str = "ok"
    seconds: float = 0.0
    peak_gib: float = 0.0  # allocated on the device
    measures: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""  # why it failed or was skipped

    def note(self, what: str, value: Any) -> None:
        """Keep something that has no bound."""
        self.measures.append({"what": what, "value": value})

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Keep a value; AssertionError where it is above the bound, or not a number."""
        self.measures.append({"what": what, "value": value, "at_most": bound})
        if not value <= bound:
            raise AssertionError(f"{what} is {value:.3g}, above {bound:g}")

    def at_least(self, what: str, value: float, bound: float) -> None:
        """Keep a value; AssertionError where it is below the bound, or not a number."""
        self.measures.append({"what": what, "value": value, "at_least": bound})
        if not value >= bound:
            raise AssertionError(f"{what} is {value:.3g}, below {bound:g}")

    def line(self) -> str:
        """The row as it is printed."""
        said = [_say(one) for one in self.measures]
        if self.detail:
            said.append(self.detail)
        return f"{self.name:<19} {self.status:<8} {self.seconds:>6.1f}  {'; '.join(said)}"


def _say(measure: dict[str, Any]) -> str:
    value = measure["value"]
    said = f"{measure['what']} {value:.3g}" if isinstance(value, float) else (
        f"{measure['what']} {value}"
    )  # fmt: skip
    for kind, sign in (("at_most", "<="), ("at_least", ">=")):
        if kind in measure:
            said += f" ({sign} {measure[kind]:g})"
    return said


def run_row(name: str, check: Callable[[Row], None]) -> Row:
    """Run one check; whatever it raises is its verdict."""
    row = Row(name)
    gc.collect()  # an actor refers to itself in circles: the row before may still hold one
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
