"""When a window is kept: a spike, a slow rise, a number that is not finite, a step, a signal."""

from __future__ import annotations

import itertools
import math
import shlex
import signal
import statistics
import sys
import threading
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidInput
from .records import Record
from .script import build_reference


@dataclass(frozen=True)
class Alarm:
    """The numbers that decide what is told."""

    flattest: float = 1e-3  # a σ below this part of the median is a run that repeats itself, not one without noise
    threshold: float = 8.0  # robust σ: of a normal spread never reached; losses have longer tails
    usual: float = 3.0  # robust σ: a value within them is no event
    # Losses that keep up are told though none of them is so far: the median of so many, by this part of the threshold.
    # With these numbers none of 72 ordinary runs on shuffled data alarms that did not (400 or 600 steps), and of 40
    # runs of a small MLP with a learning rate or a weight decay far too high for one step 38 are told where 19 were.
    lasting: int = 8
    lower: float = 0.5
    far: float = 2.0  # times: two heights within this factor are one height
    # A source of data that is harder than the rest rises above any number of σ each time it comes, because MAD sees the
    # usual steps only. What has been told four times is no news: four, since a planted cause may act three times before
    # the spike that it is asked about, and within four windows, since a source may come once a window. With these
    # numbers a source every 6th step alarms 7 times in 300 steps and no longer 41 times, and every spike of
    # benchmarks/spikes and benchmarks/culprits that alarmed before still does (28 of 28, 88 of 88; a run's first alarm
    # is never held back).
    often: int = 4  # times that a height is told
    memory: int = 4  # windows
    higher: float = 1.25  # times the highest of them: a new worst spike is news, however often one nearly as high came
    # Before there are enough losses for a spread they fall fast and scatter, so that only what is far above them is
    # told. With these numbers none of 1248 ordinary runs alarmed in its first 16 steps; of 280 that blew up there, 23
    # of 31 did that had made three steps before, and 59 of the other 249 (docs/limits.md).
    early: int = 16  # steps
    first: int = 4  # losses that say where a run began
    blown: float = 1000.0  # times the highest, where there are fewer
    risen: float = 3.0  # times the highest, where there are as many
    lone: float = 8.0  # spreads above: of one loss above all before it
    held: float = 3.0  # the same of two in a row above the first
    # Of a slow rise, in medians of so many losses as `Drift` is told: before the first is believed, and for the spread
    # at the lowest of them, which a few losses that wander would not show.
    settling: int = 2
    wide: int = 4
    raised: float = 1.5  # times the lowest learning rate: above it the loss rises on purpose
    # Whatever the rate did, of the lowest median of the whole run. A raised rate lifts the loss on purpose, by many
    # times itself where it was near zero, and it falls again: a divergence takes back half of what was learned, too,
    # and goes on rising. With these numbers 18 of 18 runs that diverged under a rate of 1.002 to 1.006 times per step
    # are told, none of 186 ordinary ones, and one of 163 that were learned nearly by heart (docs/limits.md).
    doubled: float = 2.0  # times the lowest median
    lost: float = 0.5  # of what it had fallen by


ALARM = Alarm()
TO_SIGMA = 1.4826  # of a normal distribution: σ = 1.4826 · MAD


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


def scatter(values: Collection[float]) -> tuple[float, float]:
    """Median and 1.4826 · MAD: outliers among the values do not move them."""
    middle = statistics.median(values)
    return middle, TO_SIGMA * statistics.median(abs(x - middle) for x in values)


def usual(values: Iterable[float]) -> tuple[float, float]:
    """What comes after these values as a rule, and σ: their median and spread. Where they have fallen by more than they
    scatter, as losses of a run that learns, the median of the last quarter, and the spread around the fall.

    The fall would else count as spread, and a batch of noise in it go unseen: of losses 12 local σ above 116 ordinary
    runs 0.51 passed the threshold at step 45, and 0.70 do; the same 49 runs alarm without one, 1.2 % more often.
    """
    values = list(values)
    middle, spread = scatter(values)
    if len(values) < ALARM.early:
        return middle, spread
    half = len(values) // 2
    fall = statistics.median(values[:half]) - statistics.median(values[-half:])
    if fall <= 0:
        return middle, spread
    level = [x + fall * i / (len(values) - half) for i, x in enumerate(values)]
    around = scatter(level)[1]
    return (statistics.median(values[-(len(values) // 4) :]), around) if fall > around else (middle, spread)


def robust_z(value: float, before: Collection[float]) -> float:
    """(x − median) / (1.4826 · MAD) of the values before it, as `usual` has them."""
    middle, spread = usual(before)
    spread = max(spread, ALARM.flattest * abs(middle))
    return (value - middle) / spread if spread > 0 else math.inf if value > middle else 0.0


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
    twice as high as told;
    of the loss also where the median of eight in a row passes half of it.
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


class SlowRise(str):
    """What `Drift` says, and the numbers that it was said of."""

    lowest: float  # running median
    sigma: float

    @classmethod
    def of(cls, median: float, lowest: float, sigma: float) -> SlowRise:
        rise = (median - lowest) / sigma
        said = f"the loss has risen slowly: its running median is {median:.4g}, {rise:.1f} robust σ above {lowest:.4g}"
        found = cls(said)
        found.lowest, found.sigma = lowest, sigma
        return found


@dataclass
class _Lowest:
    """The lowest running median there was, and what the median did around it."""

    median: float = math.inf
    before: float = -math.inf  # the highest median until then
    since: float = -math.inf  # the highest one after it
    spread: float | None = None  # of the losses then
    above: int = 0  # steps in a row that it has been far above

    def follow(self, median: float, losses: Collection[float], count: int) -> bool:
        """Is the median above the lowest one? The last `count` losses are for the spread."""
        if median < self.median:
            self.median, self.before, self.since = median, max(self.before, self.since, median), median
            self.spread, self.above = None, 0
            return False
        self.since = max(self.since, median)
        if self.spread is None:  # the first loss above the lowest median: until then nobody asks for its spread
            self.spread = scatter(_last(losses, count))[1]
        return True

    def flattest(self, median: float) -> float:
        """The least σ of a run that scatters; one of the two medians may be zero."""
        return ALARM.flattest * max(abs(median), abs(self.median))

    def stays(self, far: bool, patience: int) -> bool:
        """Has the median been far above for so many steps?"""
        self.above = self.above + 1 if far else 0
        return self.above >= patience


@dataclass
class Drift:
    """A slow divergence: the median of the last `over` losses stays above the lowest such median there was.

    It fires once, when the rise has been more than `threshold` robust σ for `patience` steps; σ is the larger of the
    spread now and that of four times as many losses at the lowest median: losses that wander are no rise. A learning
    rate that goes up by half raises the loss on purpose: the lowest median is then looked for anew. Whatever the rate
    does, it fires where the median is still rising, twice the lowest of the whole run, and half of what the run had
    gained is lost, by more than `threshold` σ of that time. The step that it tells has a high loss itself.

    >>> from types import SimpleNamespace as Seen
    >>> drift = Drift(over=4, patience=4)
    >>> drift.begin(window=64)
    >>> told = [drift.fires(Seen(loss=loss, lr=0.1)) for loss in [1.0, 1.1] * 8 + [1.5, 1.6, 1.7] * 4]
    >>> [reason for reason in told if reason]
    ['the loss has risen slowly: its running median is 1.55, 6.7 robust σ above 1.05']
    >>> drift.end()
    """

    over: int = 64
    threshold: float = 5.0
    patience: int = 64
    _losses: deque[float] = field(default_factory=deque, init=False, repr=False)
    _ever: _Lowest = field(default_factory=_Lowest, init=False, repr=False)  # of the whole run
    _lowest: _Lowest = field(default_factory=_Lowest, init=False, repr=False)  # since the rate was raised
    _rate: float = field(default=math.inf, init=False, repr=False)  # the lowest since the lowest median
    _since: int = field(default=0, init=False, repr=False)  # losses since the rate was raised
    _fired: bool = field(default=False, init=False, repr=False)

    def begin(self, window: int) -> None:
        self._fired, self._losses, self._ever = False, deque(maxlen=ALARM.wide * self.over), _Lowest()
        self._forget()

    def _forget(self) -> None:
        self._lowest, self._rate, self._since = _Lowest(), math.inf, 0

    def fires(self, record: Record) -> str | None:
        if self._fired or not math.isfinite(record.loss):
            return None
        if record.lr > ALARM.raised * self._rate:
            self._forget()
        self._rate = min(self._rate, record.lr)
        self._losses.append(record.loss)
        self._since += 1
        if len(self._losses) == ALARM.early and math.isinf(self._ever.median):
            self._ever.before = statistics.median(self._losses)  # most is often learned before there is a median
        settling = ALARM.settling * self.over
        if len(self._losses) < settling:
            return None
        last = _last(self._losses, self.over)
        middle = statistics.median(last)
        said = self._rises_on(middle)
        if self._since >= settling:
            said = self._stays_above(middle, last, record.lr) or said
        # the step that is told is the one that is explained: a low loss among the high ones shows nothing of the rise
        self._fired = said is not None and record.loss > said.lowest + ALARM.usual * said.sigma
        return said if self._fired else None

    def _stays_above(self, middle: float, last: Sequence[float], rate: float) -> SlowRise | None:
        """Above the lowest median since the rate was raised."""
        low = self._lowest
        if not low.follow(middle, self._losses, self._since):
            self._rate = rate
            return None
        then, rise = low.spread or 0.0, middle - low.median
        sigma = max(scatter(last)[1], then, low.flattest(middle)) if rise > self.threshold * then else math.inf
        return (
            SlowRise.of(middle, low.median, sigma) if low.stays(rise > self.threshold * sigma, self.patience) else None
        )

    def _rises_on(self, middle: float) -> SlowRise | None:
        """Above the lowest median of the whole run, whatever the rate did. The spread now is no measure: losses that go
        away scatter more and more."""
        low = self._ever
        if not low.follow(middle, self._losses, len(self._losses)):
            return None
        sigma = max(low.spread or 0.0, low.flattest(middle))
        bars = self.threshold * sigma, (ALARM.doubled - 1) * abs(low.median), ALARM.lost * (low.before - low.median)
        stays = low.stays(middle - low.median > max(bars), self.patience)
        return SlowRise.of(middle, low.median, sigma) if stays and middle >= low.since else None

    def end(self) -> None: ...


def _last(values: Collection[float], count: int) -> list[float]:
    return list(itertools.islice(values, max(0, len(values) - count), None))


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
