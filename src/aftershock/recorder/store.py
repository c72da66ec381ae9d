"""A flight on disk: one safetensors file per step and per state, each whole or absent, and frozen windows of them.

    flight/ring/run.json                     when this run began, and its window
    flight/ring/step-00000312.safetensors    one update: batches, random states, loss, norms, hyperparameters
    flight/ring/state-00000288.safetensors   θ, m, v, counts and buffers before step 288
    flight/step-000340/flight.json           a frozen window: why, when, and the digest of every file beside it

Files are moved to their place when they are complete, so that a killed run leaves whole steps only.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.storage import hyper_from_json, hyper_to_json, save_point
from ..core.capture import Captured
from ..core.randomness import RandomState
from ..errors import InvalidFile, InvalidInput
from ..results.files import digest_of, read_tensors, write_tensors
from .records import Fed, Forward, Record

STEP_FORMAT = "aftershock-step-2"
FLIGHT_FORMAT = "aftershock-flight-1"


class Ring:
    """The last steps of a live run, on disk."""

    def __init__(self, directory: Path, window: int) -> None:
        self.directory, self.folder = directory, directory / "ring"
        self.run = {"began": time.time(), "window": window}

    def begin(self) -> None:
        """An empty ring; what an earlier run left in it becomes a flight of its own."""
        steps = _numbered(self.folder, "step")
        if steps and (self.folder / "run.json").is_file():
            self._freeze(max(steps), "left by an earlier run", _read_json(self.folder / "run.json"))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "run.json").write_text(json.dumps(self.run))

    def add_state(self, step: int, captured: Captured) -> None:
        save_point(captured, self.folder / f"state-{step:08d}.safetensors")
        self._prune(step)

    def add(self, record: Record) -> None:
        tensors, header = _to_file(record)
        write_tensors(self.folder / f"step-{record.step:08d}.safetensors", tensors, header)

    def freeze(self, step: int, reason: str) -> Path:
        """The window as it is now, under its own name: complete, or not there."""
        return self._freeze(step, reason, self.run)

    def _freeze(self, step: int, reason: str, run: Mapping[str, Any]) -> Path:
        place = next(p for p in _places(self.directory, step) if not p.exists())
        part = Path(tempfile.mkdtemp(dir=self.directory, prefix=".flight-"))
        try:
            files = {}
            for name in ("state", "step"):
                for path in filter(_whole, _numbered(self.folder, name).values()):
                    _share(path, part / path.name)
                    files[path.name] = digest_of(path)
            flight = {
                "format": FLIGHT_FORMAT,
                "step": step,
                "reason": reason,
                "run": run,
                "torch": torch.__version__,
                "files": files,
            }
            (part / "flight.json").write_text(json.dumps(flight, indent=1))
            part.chmod(0o755)
            part.rename(place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return place

    def _prune(self, newest: int) -> None:
        """Drop what no window that ends at the newest step needs."""
        states = _numbered(self.folder, "state")
        first = max((number for number in states if number < newest - self.run["window"]), default=0)
        for name in ("step", "state"):
            for number, path in _numbered(self.folder, name).items():
                if number < first:
                    path.unlink()


@dataclass(frozen=True)
class Flight:
    """A recorded window, read: an unbroken run of steps, and the files of the states among them."""

    folder: Path
    records: Mapping[int, Record]
    states: Mapping[int, Path]
    run: Mapping[str, Any]  # when the run began, and its window
    trigger: int | None = None  # the step that froze it
    reason: str = ""

    @property
    def last(self) -> int:
        return max(self.records)

    def start(self, step: int, window: int) -> int:
        """The latest recorded state that is at least `window` steps before `step`, else the earliest."""
        usable = [number for number in self.states if number < step]
        if not usable:
            raise InvalidInput(
                f"step {step} cannot be explained: the flight in {self.folder} has no state before it (it holds steps "
                f"{min(self.records)} to {self.last}); explain a later step"
            )
        return max((number for number in usable if number <= step - window), default=min(usable))


def open_flight(directory: Path, step: int | None = None) -> Flight:
    """The newest window under `directory` that holds `step`; without one, the last trigger's, else the live ring.

    `directory` may also be one frozen window itself.
    """
    if not directory.is_dir():
        raise InvalidFile(f"there is no flight at {directory}")
    frozen = [directory] if (directory / "flight.json").is_file() else _frozen(directory)
    found = [_open_frozen(folder) for folder in frozen]
    ring = directory / "ring"
    if ring.is_dir() and (step is not None or not found):
        found.append(_open_ring(ring))
    whole = [flight for flight in found if flight is not None]
    if not whole:
        raise InvalidFile(f"{directory} holds no whole step with a state before it: nothing was recorded there")
    if step is None:
        return max(whole, key=lambda flight: (flight.run["began"], flight.last))
    holding = [flight for flight in whole if step in flight.records]
    if not holding:
        held = ", ".join(f"{min(f.records)}–{f.last}" for f in whole)
        raise InvalidInput(f"step {step} was not recorded, or its window was dropped: {directory} holds steps {held}")
    # the last run that has the step, and of its windows the one that looks back furthest
    return max(holding, key=lambda flight: (flight.run["began"], flight.trigger == step, -min(flight.records)))


# --- reading


def _frozen(directory: Path) -> list[Path]:
    return [path.parent for path in sorted(directory.glob("step-*/flight.json"))]


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = _read_json(folder / "flight.json")
    if manifest.get("format") != FLIGHT_FORMAT:
        raise InvalidFile(f"{folder} is not a flight of this version of aftershock ({FLIGHT_FORMAT})")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidFile(f"{path} is not a description of a flight")
    return found


def _open_frozen(folder: Path) -> Flight | None:
    manifest = _manifest(folder)
    for name, digest in manifest["files"].items():
        path = folder / Path(name).name
        if not path.is_file():
            raise InvalidFile(f"{folder} is incomplete: {name} is missing")
        try:
            same = digest_of(path) == digest
        except (ValueError, OSError) as error:
            raise InvalidFile(f"{path} is damaged: {error}") from error
        if not same:
            raise InvalidFile(f"{path} was changed after it was written: its digest does not match flight.json")
    records = {number: read_record(path) for number, path in _numbered(folder, "step").items()}
    return _unbroken(folder, records, _numbered(folder, "state"), manifest)


def _open_ring(folder: Path) -> Flight | None:
    """What a live or killed run left: files that are not whole count as absent."""
    records = {}
    for number, path in _numbered(folder, "step").items():
        if _whole(path):
            records[number] = read_record(path)
    states = {number: path for number, path in _numbered(folder, "state").items() if _whole(path)}
    return _unbroken(folder, records, states, {"run": _read_json(folder / "run.json")})


def _unbroken(
    folder: Path, records: Mapping[int, Record], states: Mapping[int, Path], manifest: Mapping[str, Any]
) -> Flight | None:
    """The latest run of steps without a gap that begins at a state."""
    if not records:
        return None
    first = last = max(records)
    while first - 1 in records:
        first -= 1
    inside = {number: path for number, path in states.items() if first <= number <= last}
    if not inside:
        return None
    kept = {number: records[number] for number in range(min(inside), last + 1)}
    return Flight(folder, kept, inside, manifest["run"], manifest.get("step"), manifest.get("reason", ""))


def read_record(path: Path) -> Record:
    tensors, header = read_tensors(path, "recorded step", STEP_FORMAT)
    fed = []
    for i, entry in enumerate(header["fed"]):
        parts = tuple(tensors[f"batch/{i}/{k}"] for k in range(entry["tensors"]))
        own = f"random/{i}/"
        random = RandomState.of({key.removeprefix(own): t for key, t in tensors.items() if key.startswith(own)})
        fed.append(Fed(entry["structure"], parts, entry["index"], random))
    autocast, dtype, evaluating = header["forward"]
    return Record(
        step=header["step"],
        fed=tuple(fed),
        loss=float(header["loss"]),
        norm=float(header["norm"]),
        raw_norm=float(header["raw_norm"]),
        hypers=tuple(hyper_from_json(h) for h in header["hypers"]),
        clip=header["clip"],
        forward=Forward(autocast, getattr(torch, dtype), tuple(evaluating)),
        divisor=header["divisor"],
    )


def _to_file(record: Record) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def _whole(path: Path) -> bool:
    """Is the file as long as its header says?"""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _numbered(folder: Path, name: str) -> dict[int, Path]:
    found = {}
    for path in folder.glob(f"{name}-*.safetensors"):
        digits = path.stem.removeprefix(f"{name}-")
        if digits.isdigit():
            found[int(digits)] = path
    return dict(sorted(found.items()))


def _places(directory: Path, step: int) -> Iterator[Path]:
    """step-000340, then step-000340-2, … where an earlier run has that name."""
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
