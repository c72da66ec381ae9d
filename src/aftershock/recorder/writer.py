"""Work done in the order it was given, in a thread beside training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Writer:
    """One thread and a queue. After a failure it drops all further work and keeps the error.

    A queue that is full holds the caller up: memory stays bounded where the disk is slower than training.
    """

    def __init__(self, capacity: int) -> None:
        self.error: Exception | None = None
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name="aftershock recorder", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def wait(self) -> None:
        """Until all work so far is done."""
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self.error is None:
                    work()
            except Exception as error:
                self.error = error
            finally:
                del work  # it may hold a copy of the state
                self._queue.task_done()
        self._queue.task_done()
