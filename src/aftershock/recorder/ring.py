"""The last steps of a live run on disk, and the windows that are frozen out of them.

    flight/lock.json                         while the run records: its process
    flight/ring/run.json                     the run's id, when it began, its window
    flight/ring/step-00000312.safetensors    one update: batches, random states, loss, norms, hyperparameters
    flight/ring/state-00000288.safetensors   θ, m, v, counts and buffers before step 288
    flight/ring/trigger.json                 while a window is open: the step that triggered, why, and how high it rose
    flight/step-000340/flight.json           a frozen window: why, when, and the digest of every file beside it

Files are moved to their place when they are complete, so that a killed run leaves whole steps only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..api.storage import save_point
from ..core.capture import Captured
from ..results.files import write_tensors
from .record_files import to_file
from .records import Record
from .store import FLIGHT_FORMAT, Seen, numbered, write_json


class Ring:
    """Written by one thread. late: by how many steps a trigger may come after a state was added."""

    def __init__(self, directory: Path, run: Mapping[str, Any], keep: int, late: int) -> None:
        self.directory, self.folder, self.run, self.keep = directory, directory / "ring", run, keep
        self._span = run["window"] + late
        self.frozen: dict[Path, Seen] = {}  # this run's windows, the oldest first, and what each is about
        self._digests: dict[str, str] = {}
        self._held: int | None = None  # the first trigger of the window that is still open

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "run.json", self.run)

    def stopped(self, reason: str) -> None:
        """Leave word that the run went on without a recorder: nobody looked at what came then."""
        self.run = {**self.run, "stopped": reason}
        write_json(self.folder / "run.json", self.run)

    def add(self, record: Record) -> None:
        path = self.folder / f"step-{record.step:08d}.safetensors"
        self._digests[path.name] = write_tensors(path, *to_file(record))

    def add_state(self, captured: Captured) -> None:
        step = max(captured.state.counts)
        path = self.folder / f"state-{step:08d}.safetensors"
        self._digests[path.name] = save_point(captured, path)
        self._prune(step)

    def hold(self, seen: Seen, first: int) -> None:
        """A window is open: its beginning stays until it is frozen, and a killed run leaves word of it."""
        self._held = first
        write_json(self.folder / "trigger.json", seen.to_json())

    def freeze(self, seen: Seen) -> tuple[Seen | None, int]:
        """The window as it is now, under its own name: complete, or not there. Of more than `keep`, the oldest goes,
        but never the worst: (the worst, where that spared it; the step whose window went)."""
        place = next(path for path in _places(self.directory, seen.step) if not path.exists())
        part = Path(tempfile.mkdtemp(dir=self.directory, prefix=".flight-"))
        try:
            for name in self._digests:
                _share(self.folder / name, part / name)
            about = {"format": FLIGHT_FORMAT, **seen.to_json(), "run": dict(self.run), "torch": torch.__version__}
            write_json(part / "flight.json", {**about, "files": dict(self._digests)})
            part.chmod(0o755)
            part.rename(place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self.frozen[place] = seen
        self._held = None
        (self.folder / "trigger.json").unlink(missing_ok=True)
        return self._drop() if len(self.frozen) > self.keep else (None, seen.step)

    def _drop(self) -> tuple[Seen | None, int]:
        worst = max(reversed(self.frozen), key=lambda path: self.frozen[path].height)
        worst_is_high = self.frozen[worst].height > 0
        oldest = next(path for path in self.frozen if path != worst or not worst_is_high)
        spared = worst_is_high and worst == next(iter(self.frozen))
        shutil.rmtree(oldest)
        return self.frozen[worst] if spared else None, self.frozen.pop(oldest).step

    def _prune(self, newest: int) -> None:
        """Drop what no window that ends at the newest step, or at the open trigger, needs."""
        end = newest if self._held is None else min(newest, self._held)
        states = numbered(self.folder, "state")
        first = max((number for number in states if number < end - self._span), default=0)
        for name in ("step", "state"):
            for number, path in numbered(self.folder, name).items():
                if number < first:
                    path.unlink()
                    self._digests.pop(path.name, None)


def _places(directory: Path, step: int) -> Iterator[Path]:
    """step-000340, then step-000340-2, … where a run has counted its steps anew."""
    yield directory / f"step-{step:06d}"
    number = 2
    while True:
        yield directory / f"step-{step:06d}-{number}"
        number += 1


def _share(path: Path, copy: Path) -> None:
    """A second name for the same bytes, which the ring may then forget; a copy where a disk has no such names."""
    try:
        os.link(path, copy)
    except OSError:
        shutil.copy2(path, copy)
