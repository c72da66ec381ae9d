"""What a benchmark gives, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measured ratio with its bar, what the cost is made of, and what was measured beside it."""

    work: str
    measured: float
    bar: float | None  # None: measured for its own sake
    unit: str
    grows: str
    note: str = ""

    @property
    def met(self) -> bool:
        return self.bar is None or self.measured <= self.bar


@dataclass(frozen=True)
class Skipped:
    """A row that could not be measured here, and why."""

    work: str
    reason: str
    verdict: str = "skipped"


@dataclass(frozen=True)
class Growth:
    """The cost of one set of tangents, in gradients of the same model."""

    system: str
    parameters: int
    changes: int
    horizons: int
    gradients: float

    @property
    def per_transition(self) -> float:
        """Per change and step: graphs and probe gradients are shared by all changes."""
        return self.gradients / (self.changes * (self.horizons - 1))


def bars(rows: Sequence[Row | Skipped], title: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("work", ratio=5)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("bar", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it grows with", ratio=4)
    table.add_column("beside it", ratio=4)
    for row in rows:
        if isinstance(row, Skipped):
            table.add_row(row.work, "—", "", f"[yellow]{row.verdict}[/]", row.reason, "")
            continue
        verdict = "" if row.bar is None else "[green]ok[/]" if row.met else "[red]missed[/]"
        table.add_row(
            row.work,
            f"{row.measured:.3g} {row.unit}".rstrip(),
            "" if row.bar is None else f"≤ {row.bar:.3g}",
            verdict,
            row.grows,
            row.note,
        )
    return table


def growths(rows: Sequence[Growth]) -> Table:
    table = Table(title="How tangents grow (g: one gradient of the same model)", title_justify="left")
    for name in ("model", "parameters", "changes N", "horizons H", "cost in g", "per change and step"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row.system,
            f"{row.parameters:,}",
            str(row.changes),
            str(row.horizons),
            f"{row.gradients:.1f}",
            f"{row.per_transition:.2f}",
        )
    return table
