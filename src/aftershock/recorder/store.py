"""A flight on disk, read: which window answers a question, and what of it is whole. `ring.py` says what lies where.

Whatever is wrong with a file is an `InvalidFile`; a damaged window does not keep the others from being read.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.storage import hyper_from_json, hyper_to_json
from ..core.randomness import RandomState
from ..errors import InvalidFile, InvalidInput
from ..results.files import malformed, read_header, read_tensors, write_whole
from .records import Fed, Forward, Record, check
from .runs import run_folders

STEP_FORMAT = "aftershock-step-2"
FLIGHT_FORMAT = "aftershock-flight-2"
LONGEST = 10**6  # steps in one window: more is no window but a name that makes no sense


@dataclass(frozen=True)
class Kept:
    """What flight.json says of a frozen window."""

    format: str
    step: int
    reason: str
    run: dict[str, Any]
    torch: str
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
    missing: tuple[int, ...] = ()  # steps that the window lacks, since a file of theirs or of a state is lost

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
    """The newest run's window that holds `step`; without one, its last trigger's, else its ring.

    `directory` may also be one frozen window itself. Only the window that answers is read.
    run: the id of the only run that may answer, whose own folder this is.
    """
    if not directory.is_dir():
        raise InvalidFile(f"there is no flight at {directory}")
    if (directory / "flight.json").exists():
        return _Frozen.of(directory).open(step)
    folders = run_folders(directory) if run is None else [directory]
    runs = [_windows(folder) for folder in reversed(folders)]
    if step is None:
        newest = next((windows for windows in runs if windows), None)
        if newest is None:
            raise InvalidFile(f"{directory} holds no whole step with a state before it: nothing was recorded there")
        return _of(run, _last_trigger(newest))
    for windows in runs:
        holding = [window for window in windows if step in window.steps]
        if holding:
            return _of(run, _first_whole(holding, step))
    held = ", ".join(f"{min(w.steps)}–{max(w.steps)}" for windows in runs for w in windows if w.steps)
    raise InvalidInput(
        f"step {step} was not recorded, or its window was dropped: {directory} holds steps {held or 'of no run'}"
    )


def _of(run: str | None, flight: Flight) -> Flight:
    if run is not None and flight.run["id"] != run:
        raise InvalidFile(f"{flight.folder} was written by another run than the one that is asked for")
    return flight


# --- which window


@dataclass(frozen=True)
class _Window(ABC):
    """A folder that may answer, before any of its steps is read."""

    folder: Path
    steps: Mapping[int, Path]
    states: Mapping[int, Path]

    @abstractmethod
    def open(self, step: int | None) -> Flight: ...


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

    @property
    def trigger(self) -> int:
        """By its name where its description is damaged."""
        return self.kept.step if self.kept is not None else max(self.steps, default=-1)

    def open(self, step: int | None) -> Flight:
        if self.error is not None or self.kept is None:
            raise InvalidFile(f"{self.error}") from self.error
        digests = self.kept.files
        for path in (*self.steps.values(), *self.states.values()):
            if not path.is_file():
                raise InvalidFile(f"{self.folder} is incomplete: {path.name} is missing")
            if read_header(path)[0] != digests[path.name]:
                raise InvalidFile(f"{path} was changed after it was written: its digest does not match flight.json")
        records = {number: read_record(path, number) for number, path in self.steps.items()}
        wanted = self.kept.step if step is None else step
        return _unbroken(self, records, self.states, self.kept.run, wanted, {}, self.kept.step, self.kept.reason)


@dataclass(frozen=True)
class _Ring(_Window):
    """What a live or killed run has on disk: a file that is not whole is a hole, and is said."""

    def open(self, step: int | None) -> Flight:
        run = _run(_read_json(self.folder / "run.json"), self.folder)
        trigger, reason = self.trigger()
        damaged: dict[int, str] = {}
        records = {}
        for number, path in self.steps.items():
            try:
                records[number] = read_record(path, number)
            except InvalidFile as error:
                damaged[number] = str(error)
        wanted = step if step is not None else max(records, default=0) if trigger is None else trigger
        states = {number: path for number, path in self.states.items() if _is_state(path, number)}
        return _unbroken(self, records, states, run, wanted, damaged, trigger, reason)

    def trigger(self) -> tuple[int | None, str]:
        """The trigger whose window is still open."""
        if not (self.folder / "trigger.json").exists():
            return None, ""
        return _trigger(_read_json(self.folder / "trigger.json"), self.folder)


def _windows(folder: Path) -> list[_Window]:
    """All windows of one run: frozen ones and the ring."""
    frozen: list[_Window] = [_Frozen.of(path.parent) for path in sorted(folder.glob("step-*/flight.json"))]
    ring = folder / "ring"
    steps = numbered(ring, "step")
    return [*frozen, _Ring(ring, steps, numbered(ring, "state"))] if steps else frozen


def _last_trigger(windows: Sequence[_Window]) -> Flight:
    """The last trigger's window of a run. A damaged one is said: an earlier trigger would be another question."""
    ring = next((window for window in windows if isinstance(window, _Ring)), None)
    frozen = [window for window in windows if isinstance(window, _Frozen)]
    if ring is not None and (not frozen or (ring.folder / "trigger.json").exists()):
        return ring.open(None)
    last = max(frozen, key=lambda window: window.trigger)
    try:
        return last.open(None)
    except InvalidFile as error:
        others = ", ".join(str(window.trigger) for window in frozen if window is not last)
        hint = f"; the windows of other triggers can be asked for by their steps ({others})" if others else ""
        raise InvalidFile(f"{error}{hint}") from error


def _first_whole(windows: Sequence[_Window], step: int) -> Flight:
    """All hold the step of the same run: the one that was kept for it, else the one that looks back furthest."""

    def order(window: _Window) -> tuple[bool, int]:
        return not (isinstance(window, _Frozen) and window.trigger == step), min(window.steps)

    refused: list[InvalidFile] = []
    for window in sorted(windows, key=order):
        try:
            return window.open(step)
        except InvalidFile as error:
            refused.append(error)
    raise refused[0]


def _unbroken(
    window: _Window,
    records: Mapping[int, Record],
    states: Mapping[int, Path],
    run: Mapping[str, Any],
    wanted: int,
    damaged: Mapping[int, str],
    trigger: int | None,
    reason: str,
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
    return Flight(window.folder, kept, inside, run, trigger, reason, missing)


# --- files


def _kept(path: Path) -> Kept:
    values = _read_json(path, FLIGHT_FORMAT)
    step, reason = _trigger(values, path.parent)
    files = values.get("files")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise InvalidFile(f"{path} lists no files")
    for name in files:
        if not re.fullmatch(r"(step|state)-[0-9]{8,12}\.safetensors", name):
            raise InvalidFile(f"{path} lists {name[:80]!r}, which is no file of a flight")
    return Kept(FLIGHT_FORMAT, step, reason, _run(values.get("run"), path.parent), str(values.get("torch")), files)


def _trigger(values: Mapping[str, Any], folder: Path) -> tuple[int, str]:
    step, reason = values.get("step"), values.get("reason")
    if type(step) is not int or not isinstance(reason, str):
        raise InvalidFile(f"{folder} does not say which step it was kept for, and why")
    return step, reason


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
        raise InvalidFile(f"{path.parent} is not a flight of this version of aftershock ({FLIGHT_FORMAT})")
    if found.pop("digest", None) != _digest(found):
        raise InvalidFile(f"{path} was changed after it was written: its digest does not match")
    return found


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_record(path: Path, step: int) -> Record:
    with malformed(path, "recorded step"):
        tensors, header = read_tensors(path, "recorded step", STEP_FORMAT)
        record = _from_file(tensors, header)
    if record.step != step:
        raise InvalidFile(f"{path} holds step {record.step}: it is not the file that its name says")
    return record


def _from_file(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Record:
    fed = []
    for i, entry in enumerate(header["fed"]):
        parts = tuple(tensors[f"batch/{i}/{k}"] for k in range(entry["tensors"]))
        check(entry["structure"], parts)
        own = f"random/{i}/"
        random = RandomState.of({key.removeprefix(own): t for key, t in tensors.items() if key.startswith(own)})
        fed.append(Fed(entry["structure"], parts, int(entry["index"]), random))
    autocast, dtype, evaluating = header["forward"]
    if not isinstance(getattr(torch, dtype), torch.dtype) or not fed:
        raise ValueError(f"autocast to {dtype!r}, {len(fed)} batches")
    clip, divisor = header["clip"], header["divisor"]
    return Record(
        step=int(header["step"]),
        fed=tuple(fed),
        loss=float(header["loss"]),
        norm=float(header["norm"]),
        raw_norm=float(header["raw_norm"]),
        hypers=tuple(hyper_from_json(h) for h in header["hypers"]),
        clip=None if clip is None else float(clip),
        forward=Forward(bool(autocast), getattr(torch, dtype), tuple(str(name) for name in evaluating)),
        divisor=None if divisor is None else float(divisor),
    )


def to_file(record: Record) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for i, fed in enumerate(record.fed):
        tensors |= {f"batch/{i}/{k}": tensor for k, tensor in enumerate(fed.tensors)}
        tensors |= {f"random/{i}/{name}": value for name, value in fed.random.tensors().items()}
    header = {
        "format": STEP_FORMAT,
        "step": record.step,
        "fed": [{"structure": f.structure, "tensors": len(f.tensors), "index": f.index} for f in record.fed],
        "loss": str(record.loss),
        "norm": str(record.norm),
        "raw_norm": str(record.raw_norm),
        "hypers": [hyper_to_json(h) for h in record.hypers],
        "clip": record.clip,
        "divisor": record.divisor,
        "forward": [
            record.forward.autocast,
            str(record.forward.autocast_dtype).removeprefix("torch."),
            list(record.forward.evaluating),
        ],
    }
    return tensors, header


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
