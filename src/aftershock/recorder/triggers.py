"""When a window is kept: a spike, a number that is not finite, a step, a signal."""

from __future__ import annotations

import math
import signal
import statistics
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import InvalidInput
from .records import Record

TO_SIGMA = 1.4826  # of a normal distribution: σ = 1.4826 · MAD
FLATTEST = 1e-3  # a σ below this part of the median is a run that repeats itself, not one without noise


class Trigger(Protocol):
    """Asked after every step; says why the window is to be kept, or nothing."""

    def begin(self, window: int) -> None: ...

    def fires(self, record: Record) -> str | None: ...

    def end(self) -> None: ...


def usual(values: Sequence[float]) -> tuple[float, float]:
    """Median and 1.4826 · MAD: outliers among the values do not move them."""
    middle = statistics.median(values)
    return middle, TO_SIGMA * statistics.median(abs(x - middle) for x in values)


def robust_z(value: float, before: Sequence[float]) -> float:
    """(x − median) / (1.4826 · MAD) of the values before it."""
    middle, spread = usual(before)
    spread = max(spread, FLATTEST * abs(middle))
    return (value - middle) / spread if spread > 0 else math.inf if value > middle else 0.0


@dataclass
class Spike:
    """A robust z-score of the loss or of the gradient norm ("loss", "norm") over the window before it.

    It fires when the score passes the threshold and again only once it has come back. `warmup`: steps to see first.
    """

    of: str = "loss"
    threshold: float = 8.0
    warmup: int = 16
    _before: deque[float] = field(default_factory=deque, init=False, repr=False)
    _high: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.of not in ("loss", "norm") or not self.threshold > 0:
            raise InvalidInput(f'Spike watches "loss" or "norm" above a positive threshold; got {self!r}')

    def begin(self, window: int) -> None:
        self._before, self._high = deque(maxlen=window), False

    def fires(self, record: Record) -> str | None:
        value = record.loss if self.of == "loss" else record.told_norm
        if not math.isfinite(value):
            return None
        z = robust_z(value, self._before) if len(self._before) >= self.warmup else 0.0
        was_high, self._high = self._high, z > self.threshold
        self._before.append(value)
        name = "loss" if self.of == "loss" else "gradient norm"
        return f"the {name} is {value:.4g}, {z:.1f} robust σ above its median" if self._high and not was_high else None

    def end(self) -> None: ...


@dataclass
class NotANumber:
    """A loss or gradient norm that is NaN or infinite, the first of a row."""

    _seen: bool = field(default=False, init=False, repr=False)

    def begin(self, window: int) -> None:
        self._seen = False

    def fires(self, record: Record) -> str | None:
        was, self._seen = self._seen, not record.finite
        return f"the loss is {record.loss} and the gradient norm {record.norm}" if self._seen and not was else None

    def end(self) -> None: ...


@dataclass(frozen=True)
class AtStep:
    """One step, by its number (updates made before it, from 0)."""

    step: int

    def begin(self, window: int) -> None: ...

    def fires(self, record: Record) -> str | None:
        return f"step {self.step} was asked for" if record.step == self.step else None

    def end(self) -> None: ...


@dataclass
class OnSignal:
    """A signal to the process, such as `signal.SIGUSR1`. It can be asked for in the main thread only."""

    number: int
    _asked: bool = field(default=False, init=False, repr=False)
    _previous: Any = field(default=None, init=False, repr=False)

    def begin(self, window: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidInput("OnSignal needs the recorder to be entered in the main thread")
        self._previous = signal.signal(self.number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def fires(self, record: Record) -> str | None:
        asked, self._asked = self._asked, False
        return f"signal {signal.Signals(self.number).name}" if asked else None

    def end(self) -> None:
        signal.signal(self.number, self._previous)


def default_triggers() -> tuple[Trigger, ...]:
    """Spikes of the loss and of the gradient norm, and numbers that are not finite."""
    return (Spike("loss"), Spike("norm"), NotANumber())
