"""Interleaved timing: what is compared runs in turns, and a ratio is the median over the turns."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """Something to time, `calls` times per turn: enough for a short piece of work to average its noise."""

    run: Callable[[], object]
    calls: int = 1


@dataclass
class Times:
    """Seconds per call of each work, one entry per turn."""

    turns: list[dict[str, float]] = field(default_factory=list)

    def ratio(self, formula: Callable[[dict[str, float]], float]) -> float:
        """The median over turns of a ratio of times of the same turn, so that slow drift cancels."""
        return statistics.median(formula(turn) for turn in self.turns)

    def seconds(self, name: str) -> float:
        return statistics.median(turn[name] for turn in self.turns)


def interleave(works: dict[str, Work], rounds: int, device: torch.device, *, warm: bool = True) -> Times:
    """Run every work in turn, `rounds` times over.

    `warm` runs each once beforehand; leave it out where the work takes seconds and was prepared already.
    """
    clock = clock_of(device)
    times = Times()
    with quiet():
        if warm:
            for work in works.values():
                work.run()
        for _ in range(rounds):
            turn = {}
            for name, work in works.items():
                gc.collect()  # graphs of the last work must not be freed on this one's time
                began = clock()
                for _ in range(work.calls):
                    work.run()
                turn[name] = (clock() - began) / work.calls
            times.turns.append(turn)
    return times


def clock_of(device: torch.device) -> Clock:
    """Seconds that the work itself takes.

    On the CPU everything runs in one thread, so its CPU time is its wall time on an idle machine, and stays
    so while other programs want the same cores. On a GPU: wall time, once the device has finished.
    """
    if device.type != "cuda":
        return time.process_time

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars: drawing one costs time, and a thread of its own."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def cycled(run: Callable[[int], object], length: int) -> Callable[[], object]:
    """`run(0)`, `run(1)`, … over and over: one call each, so that no input stays in the cache."""
    position = -1

    def following() -> object:
        nonlocal position
        position = (position + 1) % length
        return run(position)

    return following


def at_count(turn: dict[str, float], few: tuple[str, int], many: tuple[str, int], count: int) -> float:
    """Seconds for `count` items on the line through two measured counts: a sweep, then so much per item."""
    slope = (turn[many[0]] - turn[few[0]]) / (many[1] - few[1])
    return turn[many[0]] + (count - many[1]) * slope
