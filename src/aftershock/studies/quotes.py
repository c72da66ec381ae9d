"""How a number of the paper is read: its words, its value, and what rounding hides. The numbers: `paper.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

NUMBER = r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?"


@dataclass(frozen=True)
class Quote:
    """A number of the paper: its words, their value, and how far rounding may have moved it.

    kind: "value"; "tied" ("--"); "range" ("3.5 to 4"); "count" ("15 of 16"); "bound" ("> 0.99998");
    "about" ("about 2.0"); "statement" ("yes" is 1, "no" is 0).
    low, high: the paper's own quartiles of a value, the ends of a range; of a count `high` is out of how many.
    systems: of how many systems it is the median; None where the paper does not say.
    """

    text: str
    kind: str
    value: float | None
    low: float | None = None
    high: float | None = None
    half_unit: float = 0.0
    systems: int | None = None

    @classmethod
    def of(cls, text: str) -> Quote:
        """Read a number as the paper's tables write it."""
        if text == "--":
            return cls(text, "tied", None)
        if text in ("yes", "no"):
            return cls(text, "statement", float(text == "yes"))
        found = [float(number) for number in re.findall(NUMBER, text)]
        unit = _half_unit(re.findall(NUMBER, text)[0])
        if " of " in text:
            return cls(text, "count", found[0], high=found[1])
        if " to " in text:
            return cls(text, "range", (found[0] + found[1]) / 2, found[0], found[1], unit)
        kind = "bound" if text.startswith(">") else "about" if text.startswith("about") else "value"
        low, high = found[1:] if len(found) == 3 else (None, None)
        return cls(text, kind, found[0], low, high, unit)


def _half_unit(number: str) -> float:
    """Half a unit of the last printed digit."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


@dataclass(frozen=True)
class Table:
    """A table of the paper: its label, what it shows, and its numbers by row and column.

    systems: behind each number; by how a row begins where rows differ.
    """

    label: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    also: tuple[str, ...] = ()
    systems: int | Mapping[str, int] | None = None

    def quotes(self) -> dict[tuple[str, str], Quote]:
        return {
            (row, column): replace(Quote.of(text), systems=self._systems_of(row))
            for row, texts in self.rows.items()
            for column, text in zip(self.columns, texts, strict=True)
        }

    def _systems_of(self, row: str) -> int | None:
        if self.systems is None or isinstance(self.systems, int):
            return self.systems
        (found,) = [count for beginning, count in self.systems.items() if row.startswith(beginning)]
        return found


def rows_of(text: str) -> dict[str, tuple[str, ...]]:
    """One row a line: its name, then its numbers, divided by spaced bars (an unspaced one is part of a name)."""
    lines = [[part.strip() for part in line.split(" | ")] for line in text.strip().splitlines()]
    return {line[0]: tuple(line[1:]) for line in lines}
