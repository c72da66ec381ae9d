"""A slow divergence: what the running median of the loss says of it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .alarm import ALARM, newest, scatter
from .records import Record


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
            self.spread = scatter(newest(losses, count))[1]
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
        last = newest(self._losses, self.over)
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
