"""What happens when something triggers: it is told at once, and its window is closed some steps later."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .records import Record
from .ring import Ring
from .triggers import Trigger, Triggered
from .writer import Writer


@dataclass
class _Open:
    """A window that has triggered and still records."""

    step: int
    reason: str
    until: int  # the last step that it takes
    limit: int  # further triggers do not move `until` beyond this


def say(message: object) -> None:
    """A line that is seen by default, and breaks nothing that reads the script's output."""
    print(f"aftershock: {message}", file=sys.stderr, flush=True)


class Windows:
    """Opens, lengthens and closes the windows of one run; files are the writer's work."""

    def __init__(
        self, ring: Ring, writer: Writer, after: int, on_trigger: Callable[[Triggered], object] | None
    ) -> None:
        self.ring, self.writer, self.after, self.on_trigger = ring, writer, after, on_trigger
        self._open: _Open | None = None

    def watch(self, record: Record, triggers: Sequence[Trigger], asked: str | None) -> None:
        reasons = [] if asked is None else [asked]
        reasons += [reason for trigger in triggers if (reason := trigger.fires(record))]
        if reasons:
            self._seen(record.step, "; ".join(reasons))
        if self._open is not None and record.step >= self._open.until:
            self.close()

    def close(self) -> None:
        """Freeze the open window with what there is."""
        if self._open is not None:
            self.writer.put(functools.partial(self.ring.freeze, self._open.step, self._open.reason))
            self._open = None

    def _seen(self, step: int, reason: str) -> None:
        if self._open is None:
            self._open = _Open(step, reason, step + self.after, step + max(self.after, self.ring.run["window"]))
        else:
            self._open.reason += f"; step {step}: {reason}"
            self._open.until = min(step + self.after, self._open.limit)
        self.writer.put(functools.partial(self.ring.hold, self._open.step, self._open.reason))
        seen = Triggered(step, reason, self.ring.directory)
        say(seen)
        if self.on_trigger is not None:
            try:
                self.on_trigger(seen)
            except Exception as error:
                what = f"on_trigger failed, recording goes on: {type(error).__name__}: {error}"
                warnings.warn(what, RuntimeWarning, stacklevel=2)
