"""What a piece of work will cost, before it starts, and a progress bar while it lasts."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..core.memory import readable


@dataclass(frozen=True)
class Estimate:
    """Time and memory, from the measured time of one step of the path.

    >>> estimate = change.estimate(probe)
    >>> estimate.seconds < 60, estimate.chunks
    (True, 1)
    >>> print(Estimate(gradients=96.0, seconds=150.0, memory=3 * 2**30, chunks=2))
    about 96 gradients, 2 min and 3.0 GiB of memory in 2 chunks
    """

    gradients: float  # the work in plain gradients
    seconds: float
    # bytes at the peak, beside the model and the path; the pairs of a ranking that wait (`SweepPlan`) are not known yet
    memory: int
    chunks: int

    def __str__(self) -> str:
        return (
            f"about {self.gradients:,.0f} gradients, {duration(self.seconds)} and {readable(self.memory)} of memory"
            + (f" in {self.chunks} chunks" if self.chunks > 1 else "")
        )


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Tick(Protocol):
    def __call__(self, text: str = "") -> None: ...


@contextlib.contextmanager
def progress(title: str, total: int, estimate: Estimate | None = None) -> Iterator[Tick]:
    """A function to call once per unit of work; it draws a bar where a person is watching.

    Elsewhere (a log file) it prints a line for each unit that is given a text, with the time left.
    """
    start, done = time.monotonic(), 0
    bar = _bar(title if estimate is None else f"{title}: {estimate}", total)
    with bar if sys.stderr.isatty() else contextlib.nullcontext(_line) as show:

        def tick(text: str = "") -> None:
            nonlocal done
            done += 1
            # The mean over the whole work: a unit may take minutes, and several end at once.
            left = (time.monotonic() - start) * (total - done) / done
            show(text, f"about {duration(left)} left" if done < total else "")

        yield tick


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[str, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, left="")

        def show(text: str, left: str) -> None:
            bar.update(task, advance=1, left=left, description=f"{title}: {text}" if text else None)

        yield show


def _line(text: str, left: str) -> None:
    if text:
        print(", ".join(filter(None, (text, left))), file=sys.stderr, flush=True)
