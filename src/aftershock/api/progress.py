"""What a piece of work will cost, before it starts, and a progress bar while it lasts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core.memory import readable


@dataclass(frozen=True)
class Estimate:
    """Time and memory, from the measured time of one step of the path."""

    gradients: float  # the work in plain gradients
    seconds: float
    memory: int  # bytes beside the path and the model's own activations
    chunks: int

    def __str__(self) -> str:
        return (
            f"about {self.gradients:,.0f} gradients, {_duration(self.seconds)} and {readable(self.memory)} of memory"
            + (f" in {self.chunks} chunks" if self.chunks > 1 else "")
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def progress(title: str, total: int, estimate: Estimate | None = None) -> Iterator[Callable[[], None]]:
    """A function to call once per unit of work; it draws a bar where a person is watching."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title if estimate is None else f"{title}: {estimate}", total=total)
        yield lambda: bar.advance(task)
