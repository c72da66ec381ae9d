"""What happens when something triggers: it is told at once, and its window is closed some steps later."""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .alarm import ALARM, robust_z, usual
from .drift import SlowRise
from .event import BARS
from .records import Record
from .ring import Ring
from .script import missing_build
from .store import Seen
from .triggers import Trigger, Triggered, say
from .writer import Writer


@dataclass
class _Open:
    """A window that has triggered and still records."""

    seen: Seen  # what it is about
    first: int  # the step that opened it
    until: int  # the last step that it takes
    limit: int  # further triggers do not move `until` beyond this


class Windows:
    """Opens, lengthens and closes the windows of one run; files are the writer's work."""

    def __init__(
        self, ring: Ring, writer: Writer, after: int, on_trigger: Callable[[Triggered], object] | None
    ) -> None:
        self.ring, self.writer, self.after, self.on_trigger = ring, writer, after, on_trigger
        self._open: _Open | None = None
        self._losses: deque[float] = deque(maxlen=ring.run["window"])
        self._hinted = False

    def watch(self, record: Record, triggers: Sequence[Trigger], asked: str | None) -> None:
        reasons = [] if asked is None else [asked]
        reasons += [reason for trigger in triggers if (reason := trigger.fires(record))]
        if reasons:
            only = reasons[0] if len(reasons) == 1 else None  # beside something else it is not what is explained
            rise = (only.lowest, only.sigma) if isinstance(only, SlowRise) else None
            self._seen(Seen(record.step, "; ".join(reasons), self._height(record), rise))
        if math.isfinite(record.loss):
            self._losses.append(record.loss)
        if self._open is not None and record.step >= self._open.until:
            self.close()

    def close(self) -> None:
        """Freeze the open window with what there is."""
        if self._open is not None:
            self.writer.put(functools.partial(self._freeze, self._open.seen))
            self._open = None

    def _freeze(self, seen: Seen) -> None:
        spared, dropped = self.ring.freeze(seen)
        if spared is not None:
            say(
                f"keep={self.ring.keep}: the window of step {dropped} is dropped; that of step {spared.step} stays, "
                f"the worst of this run ({spared.height:.4g} above the usual loss)"
            )

    def _height(self, record: Record) -> float:
        """How far the loss is above the usual; nothing within its spread, infinite where it is not a number."""
        if not record.finite:
            return math.inf
        if not self._losses or robust_z(record.loss, self._losses) <= BARS.gone:
            return 0.0
        return record.loss - usual(self._losses)[0]

    def _seen(self, seen: Seen) -> None:
        reach = max(self.after, self.ring.run["window"])
        if self._open is None:
            self._open = _Open(seen, seen.step, seen.step + self.after, seen.step + reach)
        else:
            self._join(self._open, seen, reach)
        self.writer.put(functools.partial(self.ring.hold, self._open.seen, self._open.first))
        self._tell(Triggered(seen.step, seen.reason, self.ring.directory))

    def _join(self, window: _Open, seen: Seen, reach: int) -> None:
        """A trigger inside an open window; one that is far higher is what the window is then about."""
        earlier = window.seen
        if math.isfinite(seen.height) and seen.height > ALARM.far * earlier.height:
            window.seen = replace(seen, reason=f"{seen.reason}; step {earlier.step}: {earlier.reason}")
            window.limit = seen.step + reach
        else:
            window.seen = replace(earlier, reason=f"{earlier.reason}; step {seen.step}: {seen.reason}")
        window.until = min(seen.step + self.after, window.limit)

    def _tell(self, seen: Triggered) -> None:
        say(seen)
        hint = missing_build()
        if hint is not None and not self._hinted:
            say(hint)
        self._hinted = True
        if self.on_trigger is not None:
            try:
                self.on_trigger(seen)
            except Exception as error:
                what = f"on_trigger failed, recording goes on: {type(error).__name__}: {error}"
                warnings.warn(what, RuntimeWarning, stacklevel=2)
