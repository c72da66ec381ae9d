"""When a window is kept: a spike, a number that is not finite, a step, a signal; a slow rise stands in `drift`."""

from __future__ import annotations

import math
import shlex
import signal
import statistics
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidInput
from .alarm import ALARM, robust_z, usual
from .drift import Drift
from .records import Record
from .script import build_reference


def say(message: object) -> None:
    """A line that is seen by default, and breaks nothing that reads the script's output."""
    print(f"aftershock: {message}", file=sys.stderr, flush=True)


class Trigger(Protocol):
    """Asked after every step; says why the window is to be kept, or nothing. Any class with these methods will do.

    >>> class Often:
    ...     def begin(self, window): ...
    ...     def fires(self, record): return None if record.step % 20 else "one step of twenty"
    ...     def end(self): ...
    >>> seen = []
    >>> with ak.FlightRecorder(model, optimizer, loss_fn, triggers=[Often()], on_trigger=seen.append) as recorder:
    ...     recorder.step(batches[0], train_step(batches[0]))
    >>> [(one.step, one.reason) for one in seen]
    [(40, 'one step of twenty')]
    """

    def begin(self, window: int) -> None: ...

    def fires(self, record: Record) -> str | None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Triggered:
    """What was seen, where it is kept, and what to type next; `on_trigger=` is given this.

    >>> seen = Triggered(340, "the loss is 9.1", Path("flight"))
    >>> seen.step, "flight" in seen.command, "340" in seen.command
    (340, True, True)
    """

    step: int
    reason: str
    folder: Path

    @property
    def command(self) -> str:
        """What to type next: a command, or a line of Python where no script runs, as in a notebook."""
        build = build_reference()
        if build is None:
            return f'ak.explain("{self.folder}", step={self.step})'
        return f"aftershock explain {shlex.quote(str(self.folder))} --step {self.step} --build {shlex.quote(build)}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}. Kept in {self.folder}; explain it with: {self.command}"


def rose_at_once(value: float, before: Sequence[float]) -> str | None:
    """How a loss is far above the few before it: by itself, or as the second in a row that is far above the first."""
    first, several = before[: ALARM.first], len(before) > 1
    if not before or robust_z(value, before) <= ALARM.usual:
        return None
    if _far(value, before, ALARM.lone):
        return f"where the {f'highest of the {len(before)}' if several else 'one'} before it is {max(before):.4g}"
    if len(before) > ALARM.first and _far(min(value, before[-1]), first, ALARM.held):
        return f"after {before[-1]:.4g}, where the highest of the first {ALARM.first} is {max(first):.4g}"
    return None


def _far(value: float, before: Sequence[float], spreads: float) -> bool:
    high = max(before)
    if len(before) < ALARM.first:
        return value > ALARM.blown * high > 0
    return value - high > max(spreads * (high - min(before)), (ALARM.risen - 1) * abs(high)) > 0


@dataclass
class Spike:
    """A robust z-score of the loss or of the gradient norm ("loss", "norm") over the window before it.

    It fires when the score passes the threshold, and again once the value has come back to within 3 σ, or when it is
    twice as high as told; of the loss also where the median of eight in a row passes half of it.
    A height that was told four times within four windows, as that of a harder source of data, is no news, unless it is
    the highest of them by a quarter.
    `warmup`: steps to see first. Among the first 16 of them it fires where a loss is three times as high as all before
    it (of fewer than four, a thousand times) and above them by eight times their spread, or two in a row are three
    times as high as the first four and above them by three times theirs. Gradient norms, which rise in ordinary runs,
    are not watched so early.
    Gradients reach the optimizer when they are clipped already: where the loop clips, the norm is watched only if
    `recorder.step(…, norm=)` is given what `clip_grad_norm_` returned.

    >>> from types import SimpleNamespace as Seen  # a recorder hands over its records
    >>> spike = Spike("loss", threshold=6.0)
    >>> spike.begin(window=64)
    >>> [spike.fires(Seen(loss=loss, clip=None)) for loss in [1.0, 1.1, 1.2] * 8 + [3.0]][-1]
    'the loss is 3, 12.8 robust σ above its median'
    >>> spike.end()
    """

    of: str = "loss"
    threshold: float = ALARM.threshold
    warmup: int = 16
    _before: deque[float] = field(default_factory=deque, init=False, repr=False)
    _rises: list[tuple[int, float]] = field(default_factory=list, init=False, repr=False)  # when, and how high
    _seen: int = field(default=0, init=False, repr=False)  # steps
    _high: bool = field(default=False, init=False, repr=False)
    _told: float = field(default=0.0, init=False, repr=False)  # the height of this rise that was told
    _blind: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.of not in ("loss", "norm") or not self.threshold > 0:
            raise InvalidInput(f'Spike watches "loss" or "norm" above a positive threshold; got {self!r}')

    def begin(self, window: int) -> None:
        # as many before the last eight as one loss is told beside, however short the window
        kept = max(window, self.warmup + (ALARM.lasting - 1 if self.of == "loss" else 0))
        self._before, self._rises, self._seen = deque(maxlen=kept), [], 0
        self._high, self._told, self._blind = False, 0.0, False

    def fires(self, record: Record) -> str | None:
        if self.of == "norm" and record.clip is not None and math.isnan(record.raw_norm):
            self._say_blind()
            return None
        value = record.loss if self.of == "loss" else record.told_norm
        if not math.isfinite(value):
            return None
        how_far = self._how_far(value)
        news = None if how_far is None else self._news(value - usual(self._before)[0])
        self._high = how_far is not None or (self._high and max(self._z(value), self._lasting(value)) > ALARM.usual)
        self._before.append(value)
        self._seen += 1
        name = "loss" if self.of == "loss" else "gradient norm"
        return None if news is None else f"the {name} is {value:.4g}, {how_far}{news}"

    def _how_far(self, value: float) -> str | None:
        """How far the value is above those before it, in words; None where that is not far."""
        if self._seen < min(self.warmup, ALARM.early):
            return rose_at_once(value, list(self._before)) if self.of == "loss" else None
        z = self._z(value)
        if z <= self.threshold:
            return self._stays(value) if self.of == "loss" and z > ALARM.usual else None
        return f"{z:.1f} robust σ above its median" if z < 1000 else "more than 1000 robust σ above its median"

    def _z(self, value: float) -> float:
        return robust_z(value, self._before) if len(self._before) >= self.warmup else 0.0

    def _stays(self, value: float) -> str | None:
        """The same of several losses, none of which is far."""
        z = self._lasting(value)
        if z <= ALARM.lower * self.threshold:
            return None
        return f"and the median of the last {ALARM.lasting} is {z:.1f} robust σ above that of those before"

    def _lasting(self, value: float) -> float:
        """How far the last losses, with this one, are above those before as a whole; 0 where these are too few."""
        before = [*self._before, value]
        earlier, last = before[: -ALARM.lasting], before[-ALARM.lasting :]
        return robust_z(statistics.median(last), earlier) if len(earlier) >= self.warmup else 0.0

    def _news(self, height: float) -> str | None:
        """What to add to a height that is told; None where it is not."""
        since = self._seen - ALARM.memory * (self._before.maxlen or 0)
        began, highest = self._rises.pop() if self._high else (self._seen, height)
        self._rises = [(at, other) for at, other in self._rises if at > since]
        known = sum(other * ALARM.far >= height for _, other in self._rises)
        top = max((other for _, other in self._rises), default=0.0)
        self._rises.append((began, max(highest, height)))
        told = self._told if self._high else 0.0
        if height <= ALARM.far * told or (known >= ALARM.often and height <= ALARM.higher * top):
            self._told = told
            return None
        self._told = height
        if known != ALARM.often - 1:
            return ""
        return (
            f" (it was as high {ALARM.often - 1} times before, and is told again only where it is the highest by a "
            "quarter)"
        )

    def _say_blind(self) -> None:
        if not self._blind:
            self._blind = True
            warnings.warn(
                "the flight recorder does not watch the gradient norm: the loop clips (clip=) and the norm before "
                "clipping is not told; give recorder.step(…, norm=) what clip_grad_norm_ returned",
                stacklevel=2,
            )

    def end(self) -> None: ...


@dataclass
class NotANumber:
    """A loss or gradient norm that is NaN or infinite: the first is told, further ones are counted, and their number is
    told at the end.

    >>> from types import SimpleNamespace as Seen
    >>> trigger = NotANumber()
    >>> trigger.begin(window=64)
    >>> [trigger.fires(Seen(loss=loss, norm=1.0, finite=loss < math.inf)) for loss in (0.5, math.inf, math.inf)]
    [None, 'the loss is inf and the gradient norm 1', None]
    >>> trigger.end()
    """

    _seen: int = field(default=0, init=False, repr=False)  # steps

    def begin(self, window: int) -> None:
        self._seen = 0

    def fires(self, record: Record) -> str | None:
        self._seen += not record.finite
        if record.finite or self._seen > 1:
            return None
        return f"the loss is {record.loss:.4g} and the gradient norm {record.norm:.4g}"

    def end(self) -> None:
        if self._seen > 1:
            say(f"after the first, {self._seen - 1} more step(s) had a loss or gradient norm that is not finite")


@dataclass(frozen=True)
class AtStep:
    """One step, by its number (updates made before it, from 0).

    >>> seen = []
    >>> with ak.FlightRecorder(model, optimizer, loss_fn, triggers=[AtStep(41)], on_trigger=seen.append) as recorder:
    ...     for batch in batches[:3]:
    ...         recorder.step(batch, train_step(batch))
    >>> [one.reason for one in seen]
    ['step 41 was asked for']
    """

    step: int

    def begin(self, window: int) -> None: ...

    def fires(self, record: Record) -> str | None:
        return f"step {self.step} was asked for" if record.step == self.step else None

    def end(self) -> None: ...


@dataclass
class OnSignal:
    """A signal to the process, such as `signal.SIGUSR1`. It can be asked for in the main thread only.

    >>> seen, asked = [], [OnSignal(signal.SIGUSR1)]
    >>> with ak.FlightRecorder(model, optimizer, loss_fn, triggers=asked, on_trigger=seen.append) as recorder:
    ...     signal.raise_signal(signal.SIGUSR1)  # as `kill -USR1` does from outside
    ...     recorder.step(batches[0], train_step(batches[0]))
    >>> [one.reason for one in seen]
    ['signal SIGUSR1']
    """

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
    """Spikes of the loss and of the gradient norm, a slow rise of the loss, and numbers that are not finite.

    >>> [type(trigger).__name__ for trigger in default_triggers()]
    ['Spike', 'Spike', 'Drift', 'NotANumber']
    """
    return (Spike("loss"), Spike("norm"), Drift(), NotANumber())
