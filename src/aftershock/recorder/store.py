"""A flight on disk, read: which window answers a question, and what of it is whole. `ring.py` says what lies where.

Whatever is wrong with a file is an `InvalidFile`; a damaged window does not keep the others from being read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidFile, InvalidInput
from ..results.files import OTHER_VERSION, read_header, write_whole
from .record_files import read_record
from .records import Record
from .runs import place_of, run_folders

FLIGHT_FORMAT = "aftershock-flight-3"
DROPPED = "which kept no window, and whose last steps were dropped when another run began in its folder"
LONGEST = 10**6  # steps in one window: more is no window but a name that makes no sense


@dataclass(frozen=True)
class Seen:
    """What a window is kept for: the step that triggered, why, and how far its loss is above the usual."""

    step: int
    reason: str
    height: float  # 0: the loss is usual; infinite: it is not a number
    rise: tuple[float, float] | None = None  # of a slow rise alone: the lowest running median, and σ

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "height": str(self.height)}  # JSON has no infinity

    @classmethod
    def of(cls, values: Mapping[str, Any], folder: Path) -> Seen:
        step, reason = values.get("step"), values.get("reason")
        try:
            height = float(values["height"])
        except (KeyError, TypeError, ValueError, OverflowError):
            height = math.nan
        if type(step) is not int or not isinstance(reason, str) or not height >= 0:
            raise InvalidFile(f"{folder} does not say which step it was kept for, and why")
        return cls(step, reason, height, _rise(values.get("rise"), folder))


def _rise(value: Any, folder: Path) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        lowest, sigma = map(float, value)
    except (TypeError, ValueError, OverflowError):
        lowest = sigma = math.nan
    if not (math.isfinite(lowest) and 0 < sigma < math.inf):
        raise InvalidFile(f"{folder} does not say from where the loss has risen")
    return lowest, sigma


@dataclass(frozen=True)
class Kept:
    """What flight.json says of a frozen window."""

    seen: Seen
    run: dict[str, Any]
    files: dict[str, str]  # digest of each


@dataclass(frozen=True)
class Flight:
    """A recorded window, read: an unbroken run of steps, and the files of the states among them."""

    folder: Path
    records: Mapping[int, Record]
    states: Mapping[int, Path]
    run: Mapping[str, Any]  # its id, when it began, its window
    trigger: int | None = None  # the step that the window was kept for
    reason: str = ""
    rise: tuple[float, float] | None = None  # where that is a slow rise: the lowest running median, and σ
    missing: tuple[int, ...] = ()  # steps that the window lacks, since a file of theirs or of a state is lost
    damaged: tuple[str, ...] = ()  # what was passed over because it cannot be read
    others: tuple[int, ...] = ()  # triggers of the run's other windows, where it was chosen among them
    name: str = "flight"  # of the folder that the recorder was given
    number: int = 1  # of the run in that folder
    runs: int = 1  # how many have recorded there
    elsewhere: tuple[str, ...] = ()  # folders of other runs' windows that hold the step that was asked for, too

    @property
    def last(self) -> int:
        return max(self.records)

    @property
    def after(self) -> int:
        """How many steps it holds after the trigger."""
        return 0 if self.trigger is None else max(0, self.last - self.trigger)

    def start(self, step: int, window: int) -> int:
        """The latest recorded state that is at least `window` steps before `step`, else the earliest."""
        usable = [number for number in self.states if number < step]
        if not usable:
            raise InvalidInput(
                f"step {step} cannot be explained: the flight in {self.folder} has no state before it (it holds steps "
                f"{min(self.records)} to {self.last}); explain a later step"
            )
        return max((number for number in usable if number <= step - window), default=min(usable))


def open_flight(directory: Path, step: int | None = None, run: str | None = None) -> Flight:
    """The newest run's window that holds `step`, but first one that a run has kept for it; without `step` the newest
    run's window of its worst trigger, else its ring.

    `directory` may also be one window itself, frozen or a ring. Only the window that answers is read.
    run: the id of the only run that may answer, whose own folder this is.
    """
    if not directory.is_dir():
        raise InvalidFile(f"there is no flight at {directory}")
    if (directory / "flight.json").exists():
        found = _Frozen.of(directory).open(step)
    elif (directory / "run.json").exists():
        found = _Ring.of(directory).open(step)
    else:
        folders = run_folders(directory) if run is None else [directory]
        found = _newest({folder: _windows(folder) for folder in reversed(folders)}, directory, step)
    if run is not None and found.run["id"] != run:
        raise InvalidFile(f"{found.folder} was written by another run than the one that is asked for, {DROPPED}")
    name, number, runs = place_of(found.folder.parent)
    return replace(found, name=name, number=number, runs=runs)


def _newest(runs: Mapping[Path, Sequence[_Window]], directory: Path, step: int | None) -> Flight:
    """The first of the runs, which are given with the newest first, that can answer; of those that hold a step, the
    first that has kept a window for it: that is the one whose recorder said how to explain it."""
    if step is None:
        for windows in runs.values():
            if windows:
                return _worst(windows)
        raise InvalidFile(
            f"{directory} holds no whole step with a state before it: nothing was recorded there, or by a run {DROPPED}"
            f"{_stopped(runs)}"
        )
    holding = ([window for window in windows if step in window.steps] for windows in runs.values())
    ordered = [sorted(windows, key=lambda window: window.order(step)) for windows in holding if windows]
    best = sorted(ordered, key=lambda windows: not windows[0].is_about(step))
    if best:
        others = (directory.name / windows[0].folder.relative_to(directory) for windows in best[1:])
        return replace(_first_whole(best[0], step), elsewhere=tuple(map(str, others)))
    each = [(place_of(folder)[1], _held(windows)) for folder, windows in runs.items() if windows]
    held = "; ".join(f"{steps} (run {number})" if len(each) > 1 else steps for number, steps in each)
    raise InvalidInput(
        f"step {step} was not recorded, or was dropped (of runs that are over, kept windows stay): {directory} holds "
        f"steps {held or 'of no run'}{_stopped(runs)}"
    )


def _stopped(runs: Iterable[Path]) -> str:
    """Why the newest run's recorder stopped, where it did."""
    for folder in runs:
        with contextlib.suppress(InvalidFile, OSError):
            reason = _read_json(folder / "ring" / "run.json").get("stopped")
            return f". The recorder stopped: {reason}" if reason else ""
    return ""


def _held(windows: Sequence[_Window]) -> str:
    """The steps of all windows together, such as 0–16, 40–72."""
    steps = sorted({step for window in windows for step in window.steps})
    breaks = [i for i in range(1, len(steps)) if steps[i] > steps[i - 1] + 1]
    return ", ".join(f"{steps[a]}–{steps[b - 1]}" for a, b in zip([0, *breaks], [*breaks, len(steps)]))


# --- which window


@dataclass(frozen=True)
class _Window(ABC):
    """A folder that may answer, before any of its steps is read."""

    folder: Path
    steps: Mapping[int, Path]
    states: Mapping[int, Path]

    @abstractmethod
    def seen(self) -> Seen | None:
        """What it is about, where something triggered."""

    @abstractmethod
    def open(self, step: int | None) -> Flight: ...

    def is_about(self, step: int) -> bool:
        """Was it kept for this step?"""
        try:
            seen = self.seen()
        except InvalidFile:
            return False
        return seen is not None and seen.step == step

    def order(self, step: int) -> tuple[bool, int, int]:
        """Of the windows of one run that hold a step, the one that was kept for it, else the one that looks back
        furthest, and of those the one that goes on longest."""
        return not self.is_about(step), min(self.steps), -max(self.steps)


@dataclass(frozen=True)
class _Frozen(_Window):
    """A frozen window: every file that it lists must be there, as it was written."""

    kept: Kept | None
    error: InvalidFile | None = None  # why flight.json cannot be read

    @classmethod
    def of(cls, folder: Path) -> _Frozen:
        try:
            kept = _kept(folder / "flight.json")
        except InvalidFile as error:
            return cls(folder, numbered(folder, "step"), numbered(folder, "state"), None, error)
        listed = [folder / name for name in kept.files]
        return cls(folder, numbered_in(listed, "step"), numbered_in(listed, "state"), kept)

    def whole(self) -> Kept:
        if self.kept is None:
            raise InvalidFile(f"{self.error}") from self.error
        return self.kept

    def seen(self) -> Seen:
        return self.whole().seen

    def open(self, step: int | None) -> Flight:
        kept = self.whole()
        for path in (*self.steps.values(), *self.states.values()):
            if not path.is_file():
                raise InvalidFile(f"{self.folder} is incomplete: {path.name} is missing")
            if read_header(path)[0] != kept.files[path.name]:
                raise InvalidFile(f"{path} was changed after it was written: its digest does not match flight.json")
        records = {number: read_record(path, number) for number, path in self.steps.items()}
        wanted = kept.seen.step if step is None else step
        return _unbroken(self, records, self.states, kept.run, wanted, {}, kept.seen)


@dataclass(frozen=True)
class _Ring(_Window):
    """What a live or killed run has on disk: a file that is not whole is a hole, and is said."""

    @classmethod
    def of(cls, folder: Path) -> _Ring:
        return cls(folder, numbered(folder, "step"), numbered(folder, "state"))

    def open(self, step: int | None) -> Flight:
        run = _run(_read_json(self.folder / "run.json"), self.folder)
        seen, unread = self._seen(asked=step is not None)
        damaged: dict[int, str] = {}
        records = {}
        for number, path in self.steps.items():
            try:
                records[number] = read_record(path, number)
            except InvalidFile as error:
                damaged[number] = str(error)
        wanted = step if step is not None else max(records, default=0) if seen is None else seen.step
        states = {number: path for number, path in self.states.items() if _is_state(path, number)}
        return replace(_unbroken(self, records, states, run, wanted, damaged, seen), damaged=unread)

    def seen(self) -> Seen | None:
        """What the window that is still open is about."""
        path = self.folder / "trigger.json"
        return Seen.of(_read_json(path), self.folder) if path.exists() else None

    def _seen(self, asked: bool) -> tuple[Seen | None, tuple[str, ...]]:
        """And what is damaged: where a step was asked for, it can be explained without."""
        try:
            return self.seen(), ()
        except InvalidFile as error:
            if not asked:
                raise
            return None, (str(error),)


def _windows(folder: Path) -> list[_Window]:
    """All windows of one run: frozen ones and the ring."""
    frozen: list[_Window] = [_Frozen.of(path.parent) for path in sorted(folder.glob("step-*/flight.json"))]
    ring = _Ring.of(folder / "ring")
    return [*frozen, ring] if ring.steps else frozen


def _worst(windows: Sequence[_Window]) -> Flight:
    """The window of a run whose trigger rose highest, of equals the last; its ring, where nothing has triggered.

    One that is damaged is passed over, and that is said.
    """
    kept: list[tuple[Seen, _Window]] = []
    damaged: list[InvalidFile] = []
    for window in windows:
        try:
            seen = window.seen()
        except InvalidFile as error:
            damaged.append(error)
            continue
        if seen is not None:
            kept.append((seen, window))
    kept.sort(key=lambda one: (one[0].height, one[0].step), reverse=True)
    if not kept and not damaged:
        return windows[-1].open(None)
    for i, (_, window) in enumerate(kept):
        try:
            found = window.open(None)
        except InvalidFile as error:
            damaged.append(error)
            continue
        others = sorted(seen.step for seen, _ in kept[i + 1 :])
        return replace(found, others=tuple(others), damaged=tuple(map(str, damaged)))
    raise InvalidFile(f"{damaged[0]}; step= may still explain one of the steps that are there ({_held(windows)})")


def _first_whole(windows: Sequence[_Window], step: int) -> Flight:
    """The first that is not damaged; what was passed over is said."""
    refused: list[InvalidFile] = []
    for window in windows:
        try:
            found = window.open(step)
        except InvalidFile as error:
            refused.append(error)
            continue
        return replace(found, damaged=(*map(str, refused), *found.damaged))
    raise refused[0]


def _unbroken(
    window: _Window,
    records: Mapping[int, Record],
    states: Mapping[int, Path],
    run: Mapping[str, Any],
    wanted: int,
    damaged: Mapping[int, str],
    seen: Seen | None,
) -> Flight:
    """The steps around `wanted` that follow each other and begin at a state."""
    if wanted not in records:
        why = damaged.get(wanted, f"{window.folder} does not hold step {wanted}")
        raise InvalidFile(why)
    first = last = wanted
    while first - 1 in records:
        first -= 1
    while last + 1 in records:
        last += 1
    inside = {number: path for number, path in states.items() if first <= number <= last}
    begin = min(inside, default=last + 1)
    low, high = min((*window.steps, *window.states)), max(window.steps)
    if high - low > LONGEST:
        raise InvalidFile(f"{window.folder} is no window of one run: its files are numbered from {low} to {high}")
    looked_at = range(max(low, wanted - run["window"]), high + 1)
    missing = tuple(n for n in looked_at if n not in records or n < begin)
    if wanted < begin:
        because = next(iter(damaged.values()), "a state or a step before it is missing")
        raise InvalidFile(f"step {wanted} of {window.folder} cannot be replayed: {because}")
    kept = {number: records[number] for number in range(begin, last + 1)}
    trigger, reason, rise = (None, "", None) if seen is None else (seen.step, seen.reason, seen.rise)
    return Flight(window.folder, kept, inside, run, trigger, reason, rise, missing)


# --- files


def _kept(path: Path) -> Kept:
    values = _read_json(path, FLIGHT_FORMAT)
    seen, files = Seen.of(values, path.parent), values.get("files")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise InvalidFile(f"{path} lists no files")
    for name in files:
        if not re.fullmatch(r"(step|state)-[0-9]{8,12}\.safetensors", name):
            raise InvalidFile(f"{path} lists {name[:80]!r}, which is no file of a flight")
    return Kept(seen, _run(values.get("run"), path.parent), files)


def _run(values: object, folder: Path) -> dict[str, Any]:
    wanted: dict[str, Callable[[Any], bool]] = {
        "id": lambda x: isinstance(x, str),
        "began": lambda x: type(x) in (int, float),
        "window": lambda x: type(x) is int and 2 <= x <= LONGEST,
    }
    if not isinstance(values, dict) or not all(fits(values.get(name)) for name, fits in wanted.items()):
        raise InvalidFile(f"{folder} does not say which run it is of, or that is damaged")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all, with its own digest."""
    text = json.dumps({**values, "digest": _digest(values)}, indent=1)
    write_whole(path, lambda part: Path(part).write_text(text))


def _read_json(path: Path, format: str | None = None) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidFile(f"{path} is not a description of a flight")
    if found.get("format") != format:
        raise InvalidFile(
            f"{path.parent} is not a flight of this version of aftershock ({FLIGHT_FORMAT}); {OTHER_VERSION}"
        )
    if found.pop("digest", None) != _digest(found):
        raise InvalidFile(f"{path} was changed after it was written: its digest does not match")
    return found


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_state(path: Path, step: int) -> bool:
    """Is it whole, and the one that its name says? Its bytes are proved when it is loaded."""
    try:
        counts = read_header(path)[1].get("counts")
        return isinstance(counts, list) and max(counts, default=None) == step
    except (InvalidFile, TypeError):
        return False


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """Files such as step-00000312.safetensors by their number."""
    return numbered_in(folder.glob(f"{name}-*.safetensors"), name)


def numbered_in(paths: Iterable[Path], name: str) -> dict[int, Path]:
    found = {}
    for path in paths:
        number = re.fullmatch(rf"{name}-([0-9]{{8,12}})\.safetensors", path.name)
        if number:
            found[int(number[1])] = path
    return dict(sorted(found.items()))
