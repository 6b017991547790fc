"""Rows of the table "What 1,024 ranks cost", one module for each subject.

A module has `TITLE` (the heading of its section), `TEXT` (what is compared, and how `before` was
measured at which commit) and `rows()`, which yields a `Row` as soon as it is computed.
"""

from dataclasses import dataclass
from typing import Literal

# At N real gloo ranks: f"measured at {N} gloo ranks".
How = Literal["counted", "simulated", "measured"] | str


@dataclass(frozen=True)
class Row:
    """One number of the table, in one layout.

    before: the number at the commit that the module's TEXT names, a constant; text if there is
    none, such as "did not end in 10 minutes". now: computed by this run.
    """

    what: str
    layout: str
    ranks: int
    before: float | str
    now: float | str
    unit: str
    how: How

    def to_line(self) -> str:
        """Return the row as a line of a Markdown table."""
        numbers = (_text(self.before), _text(self.now))
        start = f"| {self.what} | {self.layout} | {self.ranks:,} | "
        return start + f"{' | '.join(numbers)} | {self.unit} | {self.how} |"


HEAD = "| what | layout | ranks | before | now | unit | how |\n|---|---|---|---|---|---|---|"


def _text(number: float | str) -> str:
    """Write a number with three significant digits, larger ones in full."""
    if isinstance(number, str):
        return number
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"
